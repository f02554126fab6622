# SPDX-License-Identifier: Apache-2.0
"""``python -m mu_space`` is the command ``mu-space``."""

from mu_space.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
