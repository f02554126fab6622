# SPDX-License-Identifier: Apache-2.0
"""The ``mu-space`` command; each subcommand is one module, imported only when it is called."""
