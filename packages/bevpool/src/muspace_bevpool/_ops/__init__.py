# SPDX-License-Identifier: Apache-2.0
"""The public functions, one module per operator: checks in the caller's words, then one dispatch; `ops` gathers them."""
