# SPDX-License-Identifier: Apache-2.0
"""Test kit shared by the operator wheels: the contract every operator inherits, comparators, golden arrays.

``contract`` needs torch and pytest, ``compare`` and ``golden`` need NumPy only; nothing is imported here, so that the
pytest plugin costs no start-up time where it is merely installed.
"""
