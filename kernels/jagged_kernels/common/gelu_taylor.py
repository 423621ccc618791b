"""The one set of constants behind the activation `gelu_taylor`: GELU(x) ≈ (x + |x| − a)/2 + t(c1 +
t(c2 + t(c3 + t·c4))).

Here a = min(|x|, RANGE) and t = a². Least maximum error among the quartics in t that meet |x|/2 at
RANGE in value and slope, so that value and derivative are continuous: 3.6e-3 in the value, 2.2e-2
in the derivative, for every x.
"""

RANGE = 3.06
COEFFICIENTS = (
    0.387094523507696,
    -0.05253872479237837,
    0.0044996411707417154,
    -0.00015379236612135828,
)


def _slope() -> tuple[float, ...]:
    square = RANGE**2
    _, d1, d2, d3 = ((2 * k + 1) * c for k, c in enumerate(COEFFICIENTS))
    s3 = -d3
    s2 = square * s3 - d2
    return square * s2 - d1, s2, s3


# Within the range, GELU(x) ≈ x · gate(x), gate(x) = 1/2 + x (c1 + t(c2 + t(c3 + t·c4))). The gate's
# slope is (RANGE² − t)(s1 + t(s2 + t·s3)), because it is 0 at RANGE.
SLOPE = _slope()
