"""2**x from a table and a short polynomial: plain multiplications and additions in float64, the same bits everywhere.

x is counted in steps of 1/64 octave: ``2**(n/64) = EXP2[n % 64] * 2**(n // 64)``, and what is left of a step is below
0.011 in natural logarithms.
"""

from __future__ import annotations

import decimal
import math

import numpy as np
import numpy.typing as npt

TABLE_BITS = 6
TABLE_SIZE = 1 << TABLE_BITS
STEP = math.log(2.0) / TABLE_SIZE  # of one step, in natural logarithms
STEPS_PER_E = TABLE_SIZE / math.log(2.0)


def _exp2_table() -> npt.NDArray[np.float64]:
    """2**(j/64), correctly rounded whatever the C library."""
    with decimal.localcontext(decimal.Context(prec=50)):
        return np.array([float(decimal.Decimal(2) ** (decimal.Decimal(j) / TABLE_SIZE)) for j in range(TABLE_SIZE)])


EXP2 = _exp2_table()
