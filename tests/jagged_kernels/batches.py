"""Batches for successive training steps: (history rows of each user, candidates of each user)."""

# Short, medium and long segments, few and many users: kernels are selected by mean length and batch
# size.
FIRST_BATCHES = [
    ([200] * 7, [40] * 7),
    ([7] * 9, [3] * 9),
    ([2000] * 4, [100] * 4),
    ([30] * 300, [3] * 300),
    ([2, 2], [2, 2]),
]
LATER_BATCHES = [
    ([160] * 16, [32] * 16),  # all numbers divide by 16
    ([37] * 9, [11] * 9),
    ([16] * 64, [16] * 64),
    ([1], [1]),
    ([5], [16]),
    ([300, 0, 7, 1], [0, 3, 1, 5]),
    ([1] * 33, [1] * 33),
    ([2500, 1, 3000], [700, 0, 1]),
    ([20] * 512, [1] * 512),
    ([0, 40], [0, 7]),
    ([0, 0], [3, 1]),
    ([3, 1], [0, 0]),
]
