# SPDX-License-Identifier: Apache-2.0
"""Parts of the site that are made from the code: operator pages, tables, quoted sources, benchmark pictures."""
