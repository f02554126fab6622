# SPDX-License-Identifier: Apache-2.0
"""Test kit shared by the operator wheels: the contract every operator inherits, comparators, golden arrays.

``compare`` needs NumPy, ``plugin`` pytest, ``golden`` both, ``process`` nothing, ``properties`` hypothesis; ``contract`` and
the others need torch and pytest.  Nothing is imported here, so that the pytest plugin costs no start-up time where it is merely
installed.
"""
