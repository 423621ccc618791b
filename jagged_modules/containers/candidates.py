"""CandidateIndex: which user each candidate belongs to, in the forms callers have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jagged_kernels.common.one_thread import one_thread
from torch import Tensor

from ..scalars import check_equal, check_kind, check_size, possessive
from ..segments import (
    Queries,
    RowSegments,
    Segmentation,
    check_device,
    check_index_values,
    check_integers,
    check_is_device,
    check_not_negative,
    check_offsets,
    may_have_tail,
    outside_inference_mode,
    record_stream,
    remember,
    values_are_checkable,
)
from ..tracing import is_recording, one_call
from ..validation import check_dense, transforms_are_active
from .jagged import Jagged
from .offsets import rows_and_segments

MOST_COMPARED = 2**14  # candidates that are compared with one another


class CandidateIndex(Queries):
    """The candidate → user map of a batch. Build it with `from_map`, `from_counts`, `from_offsets`
    or `from_jagged`.

    Attributes:
        offsets: `[num_users + 1]`. Grouped by user, the candidates of user u are rows offsets[u] :
            offsets[u + 1]. What the index has computed from this tensor is computed anew after a
            write to it.
        order: `[num_candidates]` permutation that groups the candidates by user (stable), None if
            they are grouped already.
        inverse: the permutation that undoes `order`, or None.

    A model that torch.export makes with a sorted index as input takes no other index, because None
    is structure. To take candidates in any order, give the model the map and make the index inside
    of it.

    Example::

        index = jm.CandidateIndex.from_counts(torch.tensor([3, 0, 2]))  # users 0 and 2: 0..2, 3..4
        index = jm.CandidateIndex.from_map(torch.tensor([2, 0, 2]), num_users=3)
    """

    offsets: Tensor
    order: Tensor | None
    inverse: Tensor | None
    is_of_one_call = False  # made by `parse`, so nothing needs to be kept for other calls
    _elsewhere: tuple[Segmentation, CandidateIndex] | None = None  # kept by `on`

    def __init__(
        self,
        offsets: Any,
        order: Any = None,
        inverse: Any = None,
        host_counts: Tensor | None = None,
    ) -> None:
        # No checks: a pytree is rebuilt from tensors, fake tensors or other objects.
        self.offsets, self.order, self.inverse = offsets, order, inverse
        self._read_offsets(host_counts)
        self._derived: tuple[Segmentation, dict[tuple[str, int], Tensor]] = self._known, {}

    @classmethod
    @one_call
    def wrap(
        cls, candidates: CandidateIndex | Tensor, num_users: int, name: str = "candidates"
    ) -> CandidateIndex:
        """A CandidateIndex as it is. A tensor of candidates, `[num_candidates]` indices below
        num_users in any order, through `from_map`. Errors call them `name`.

        Raises:
            TypeError: neither a CandidateIndex nor an integer tensor.
            ValueError: wrong shape, or host indices outside [0, num_users).
        """
        if isinstance(candidates, CandidateIndex):
            return candidates
        check_kind(
            name,
            candidates,
            Tensor,
            "a CandidateIndex (from_jagged makes it of a container) or a torch.Tensor",
        )
        return cls.from_map(candidates, num_users, name=name)

    @classmethod
    @one_call
    def from_map(
        cls, candidate_to_user: Tensor, num_users: int, *, name: str = "candidate_to_user"
    ) -> CandidateIndex:
        """From candidate_to_user, `[num_candidates]` int32 or int64 user indices in any order,
        below num_users. Errors call them `name`.

        Where the values are not read, on a device and under torch.compile, a candidate whose index
        is out of range belongs to no user: as if its user had no history, attention gives it 0.

        Raises:
            TypeError: not an integer tensor, or num_users not an int.
            ValueError: not 1-D, or (host tensors, or under `debug_checks`) an index out of range.
        """
        check_integers(name, candidate_to_user)
        check_size("num_users", num_users, at_least=0)
        on_host = candidate_to_user.is_cpu and values_are_checkable(candidate_to_user)
        if not on_host:
            return cls._from_map(candidate_to_user, num_users, on_host, name)
        with one_thread():
            return cls._from_map(candidate_to_user, num_users, on_host, name)

    @classmethod
    def _from_map(
        cls, candidate_to_user: Tensor, num_users: int, on_host: bool, name: str
    ) -> CandidateIndex:
        check_index_values(name, candidate_to_user, num_users, "num_users - 1 = {}")
        if _groups_in_one_kernel(candidate_to_user):
            from jagged_kernels.schedule.candidates import group_candidates_on_device

            return cls(*group_candidates_on_device(candidate_to_user.contiguous(), num_users))
        # a negative index belongs to no user: as one above, behind the last user
        if not values_are_checkable(candidate_to_user):
            candidate_to_user = torch.where(candidate_to_user < 0, num_users, candidate_to_user)
        users, order = torch.sort(candidate_to_user, stable=True)
        offsets = torch.searchsorted(
            users, torch.arange(num_users + 1, dtype=users.dtype, device=users.device)
        )
        if on_host and torch.equal(users, candidate_to_user):
            return cls(offsets)
        inverse = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.shape[0], device=order.device)
        )
        return cls(offsets, order, inverse)

    @classmethod
    @one_call
    def from_counts(cls, candidates_per_user: Tensor) -> CandidateIndex:
        """From candidates_per_user, `[num_users]` int32 or int64. The candidates are grouped by
        user, in user order.

        Raises:
            TypeError: not an integer tensor.
            ValueError: not 1-D, or (host tensors, or under `debug_checks`) a negative count.
        """
        check_integers("candidates_per_user", candidates_per_user)
        check_not_negative("candidates_per_user", candidates_per_user)
        counts = candidates_per_user.long()
        return cls(torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    @classmethod
    @one_call
    def from_offsets(cls, candidate_offsets: Tensor) -> CandidateIndex:
        """From candidate_offsets, `[num_users + 1]` int32 or int64, of candidates grouped by user.

        Raises:
            TypeError: not an integer tensor.
            ValueError: not 1-D, empty, or (host tensors, or under `debug_checks`) offsets that do
                not start at 0 or decrease.
        """
        check_offsets("candidate_offsets", candidate_offsets)
        return cls(candidate_offsets)

    @classmethod
    @one_call
    def from_jagged(cls, x: Any) -> CandidateIndex:
        """From a container x whose segments are the users' candidates (JaggedTensor,
        KeyedJaggedTensor of one key, nested, Jagged, pair).

        Raises:
            TypeError, ValueError: as `Jagged.wrap`; also a KeyedJaggedTensor with several keys,
                whose segments are not users.
        """
        jagged = Jagged.wrap(x)
        if jagged.feature_keys is not None and len(jagged.feature_keys) != 1:
            raise ValueError(
                f"x must have one key, the candidates, got {jagged.feature_keys}; pass x[key]"
            )
        return cls(jagged.offsets, host_counts=jagged.host_lengths)

    def compose(self, finer: CandidateIndex) -> CandidateIndex:
        """The index of `finer`'s candidates by this index's users, where finer's users are this
        index's candidates: `vendor_to_user.compose(item_to_vendor)` is item → user.

        Synchronises if finer is sorted, on a device, and this index is not.

        Raises:
            TypeError: finer is not a CandidateIndex.
            ValueError: finer has another number of users than this index has candidates, as far as
                the host can tell, or is on another device.
        """
        check_kind("finer", finer, CandidateIndex, "a CandidateIndex")
        self.check(finer.num_users, None, "the index's groups", "finer has users")
        check_equal("finer", "be on the index's device", self.offsets.device, finer.offsets.device)
        if self.order is None and finer.order is None:
            return CandidateIndex(finer.offsets[self.offsets])
        users = self.users(finer.num_users)
        # a candidate of no vendor has no user
        users = torch.cat([users, users.new_full((1,), self.num_users)])
        return CandidateIndex.from_map(users[finer.candidate_to_user], self.num_users)

    @property
    def host_counts(self) -> Tensor | None:
        """`[num_users]` candidates per user on the host, or None if only the device knows them."""
        return self.segmentation.lengths_on_host(self.offsets)

    @property
    def num_users(self) -> int:
        """The number of users, those without candidates too."""
        return self.offsets.shape[0] - 1

    @property
    def is_sorted(self) -> bool:
        """Whether the candidates are known to be grouped by user. False for a map on a device,
        whose values are not read."""
        return self.order is None

    @property
    def candidate_to_user(self) -> Tensor:
        """`[num_candidates]` user of each candidate, in the candidates' own order. Synchronises if
        the index is sorted and on a device.

        Raises:
            ValueError: a sorted index on meta, whose number of candidates is unknown. `users` takes
                that number as an argument.
        """
        if self.order is not None:
            return self.users(self.order.shape[0])
        if self.offsets.device.type == "meta":
            raise ValueError(
                "candidate_to_user is unknown for a sorted index on meta: call"
                " users(num_candidates)"
            )
        return torch.repeat_interleave(
            torch.arange(self.num_users, device=self.offsets.device), self.offsets.diff()
        )

    def users(self, num_candidates: int) -> Tensor:
        """`candidate_to_user`, `[num_candidates]`, without a sync. The result is cached, except in
        a recorded graph.

        num_users stands for candidates that belong to no user.

        Raises:
            ValueError: the index describes another number of candidates, as far as the host can
                tell.
        """

        def find() -> Tensor:
            self.check(num_candidates, None, queries="num_candidates is")
            _, users = rows_and_segments(self.query_offsets(1), num_candidates)
            return users if self.inverse is None else users[self.inverse]

        return self._derive(("users", num_candidates), find)

    def _derive(self, key: tuple[str, int], make: Callable[[], Tensor]) -> Tensor:
        """What `make` computes from the index, once for each key; in a recorded graph and after a
        write to the offsets again."""
        if is_recording(self.offsets.device):
            return make()
        segmentation, derived = self.segmentation, self._derived
        if derived[0] is not segmentation:
            derived = self._derived = segmentation, {}
        if key not in derived[1]:
            with outside_inference_mode():
                derived[1][key] = make()
        return derived[1][key]

    def grouped(self, x: Tensor) -> Tensor:
        """x `[num_candidates, ...]`, rows in the candidates' own order, grouped by user.

        Raises:
            TypeError, ValueError: as `ungrouped`.
        """
        self._check_rows(x)
        return self.by_user(x)

    def by_user(self, x: Tensor) -> Tensor:
        """`grouped` without checks of x, as `as_given`."""
        return x if self.order is None else x.index_select(0, self.order)

    def ungrouped(self, x: Tensor) -> Tensor:
        """x `[num_candidates, ...]`, rows of candidates grouped by user, in the candidates' own
        order.

        Raises:
            TypeError, ValueError: x is not a dense tensor, or has another number of rows.
        """
        self._check_rows(x)
        return self.as_given(x)

    def _check_rows(self, x: Tensor) -> None:
        check_dense("x", x)
        if self.order is not None and x.shape[:1] != self.order.shape:
            raise ValueError(
                f"x must have a row for each of the {self.order.shape[0]} candidates, got shape"
                f" {list(x.shape)}"
            )

    def as_given(self, x: Tensor) -> Tensor:
        """`ungrouped` without checks of x, which torch.compile would not trace in a backward."""
        if self.order is None or self.inverse is None:
            return x
        if torch.compiler.is_compiling():  # one kernel, which needs no `inverse`
            return torch.empty_like(x).index_copy(0, self.order.long(), x)
        return x.index_select(0, self.inverse)

    def query_offsets(self, rows_per_candidate: int) -> Tensor:
        """`[num_users + 1]` contiguous offsets of the query rows, `rows_per_candidate` for each
        candidate, grouped by user.

        Raises:
            TypeError, ValueError: rows_per_candidate is not a non-negative integer.
        """
        check_size("rows_per_candidate", rows_per_candidate, at_least=0)
        return self._query_offsets(rows_per_candidate)

    def _query_offsets(self, rows_per_candidate: int) -> Tensor:
        if rows_per_candidate == 1 and self.offsets.is_contiguous():
            return self.offsets
        # contiguous: the product of a strided tensor has no gaps
        return self._derive(
            ("query_offsets", rows_per_candidate), lambda: self.offsets * rows_per_candidate
        )

    def query_segments(self, rows_per_candidate: int) -> RowSegments:
        """Each user's candidates are a query segment, of rows_per_candidate rows for each."""
        counts = self.host_counts
        host_lengths = None if counts is None else counts * rows_per_candidate
        num_rows = None if self.order is None else self.order.shape[0] * rows_per_candidate
        return RowSegments(self._query_offsets(rows_per_candidate), host_lengths, num_rows)

    @classmethod
    def parse(
        cls,
        candidates: CandidateIndex | Tensor,
        queries: Tensor,
        num_users: int,
        rows_per_candidate: int,
        name: str = "q",
        own: str = "candidates",
    ) -> tuple[CandidateIndex, RowSegments]:
        """The index on the queries' device, and the segments of the query rows, as operators take
        them.

        Args:
            candidates, num_users: as in `wrap`; errors call candidates `own`.
            queries: `[num_candidates, ...]`, which errors call `name`.
            rows_per_candidate: query rows of each candidate.

        Raises:
            TypeError, ValueError: as `wrap`; the index describes other numbers of candidates or of
                users, or is on another device.
        """
        index = cls.wrap(candidates, num_users, own)
        device, num_candidates = queries.device, queries.shape[0]
        have = "targets have" if name == "targets" else "the queries have"
        index.check(num_candidates, num_users, own, have)
        check_device(own, index.offsets, device, possessive(name))
        is_given, index = index is candidates, index.on(device)
        if not is_given:
            index.is_of_one_call = True
        known, num_rows = index.known_segmentation(), num_candidates * rows_per_candidate
        has_tail = may_have_tail("candidates", index.offsets, num_candidates, device, known)
        offsets = index._query_offsets(rows_per_candidate)
        return index, RowSegments(offsets, num_rows=num_rows, has_tail=has_tail)

    def on(self, device: torch.device) -> CandidateIndex:
        """The index on `device`, copied there once."""
        if self.offsets.device == device:
            return self
        if is_recording(device):
            return self.to(device, non_blocking=True)
        segmentation = self.segmentation
        if self._elsewhere is None or self._elsewhere[0] is not segmentation:
            with outside_inference_mode():
                self._elsewhere = segmentation, self.to(device, non_blocking=True)
        moved = self._elsewhere[1]
        return moved if moved.offsets.device == device else self.to(device, non_blocking=True)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> CandidateIndex:
        """The index with its tensors on `device`; self if they are there already. non_blocking is
        that of `Tensor.to`.

        host_counts stay on the host.

        Raises:
            TypeError: device is none, as a dtype.
        """
        check_is_device(device)
        if self.offsets.device == torch.device(device):
            return self
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CandidateIndex:
        """The index in page-locked memory. DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.Stream) -> None:
        """`Tensor.record_stream(stream)` of tensors on a device. TorchRec's pipelines call it."""
        record_stream(stream, self.offsets, self.order, self.inverse, *self._derived[1].values())

    def _map(self, move: Callable[[Tensor], Tensor]) -> CandidateIndex:
        offsets = move(self.offsets)
        order, inverse = (None if x is None else move(x) for x in (self.order, self.inverse))
        self.segmentation.lengths_on_host(self.offsets)  # while the offsets are on the host
        remember(offsets, self.segmentation)
        moved = CandidateIndex(offsets, order, inverse)
        moved._known = self.segmentation
        return moved

    def check(
        self,
        num_candidates: int,
        num_users: int | None,
        name: str = "candidates",
        queries: str = "the queries have",
        history: str = "the history has",
    ) -> None:
        """ValueError unless the index describes `num_candidates` candidates of `num_users` users,
        as far as the host can tell.

        Its text has the words `name`, `queries` and `history`.
        """
        if num_users is not None and self.num_users != num_users:
            raise ValueError(f"{name} describe {self.num_users} users, {history} {num_users}")
        described = None if self.order is None else self.order.shape[0]
        if described is None and not torch.compiler.is_compiling() and self.host_counts is not None:
            described = int(self.host_counts.sum())
        if described is not None and described != num_candidates:
            raise ValueError(f"{name} describe {described} candidates, {queries} {num_candidates}")

    def __repr__(self) -> str:
        return (
            f"CandidateIndex(num_users={self.num_users}, is_sorted={self.is_sorted},"
            f" device={self.offsets.device})"
        )


def _groups_in_one_kernel(candidate_to_user: Tensor) -> bool:
    """Whether one kernel, which compares all candidates, groups them faster than a sort."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # pyright: ignore[reportPrivateUsage]
        return False
    if type(candidate_to_user) is not Tensor or transforms_are_active():
        return False
    return candidate_to_user.is_cuda and 0 < candidate_to_user.shape[0] <= MOST_COMPARED
