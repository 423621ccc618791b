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
