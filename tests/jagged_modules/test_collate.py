"""Batches of users' samples, also out of a DataLoader."""

import pytest
import torch
from torch.utils.data import DataLoader

import jagged_modules as jm


class Users(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, user):
        generator = torch.Generator().manual_seed(user)
        return {
            "items": torch.randint(9, (user % 3,), generator=generator),
            "vectors": torch.randn(user + 1, 2, 4, generator=generator, dtype=torch.float16),
            "label": float(user),
            "id": torch.tensor(user),
        }


def check(batch, users):
    samples = [Users()[user] for user in users]
    assert list(batch) == list(samples[0])
    for key in ("items", "vectors"):
        rows = [sample[key] for sample in samples]
        jagged = batch[key]
        assert isinstance(jagged, jm.Jagged) and jagged.offsets.dtype == torch.int64
        assert torch.equal(jagged.values.cpu(), torch.cat(rows))
        assert jagged.host_lengths.tolist() == [len(row) for row in rows]
        for user, row in enumerate(rows):
            begin, end = jagged.offsets[user : user + 2].tolist()
            assert torch.equal(jagged.values[begin:end].cpu(), row)
    assert batch["label"].tolist() == users and batch["label"].dtype == torch.float32
    assert batch["id"].tolist() == users and batch["id"].dtype == torch.int64


@pytest.mark.parametrize("users", [[0], [3, 0, 4], [1, 2, 3, 4]], ids=str)
def test_each_users_rows_are_a_segment(users):
    check(jm.collate([Users()[user] for user in users]), users)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_makes_them(num_workers):
    batches = list(DataLoader(Users(), 2, num_workers=num_workers, collate_fn=jm.collate))
    for batch, users in zip(batches, ([0, 1], [2, 3], [4]), strict=True):
        check(batch, users)


@pytest.mark.gpu
def test_pinned_batches_move_to_a_gpu():
    for batch in DataLoader(Users(), 5, collate_fn=jm.collate, pin_memory=True):
        assert batch["items"].values.is_pinned() and batch["label"].is_pinned()
        moved = {key: x.to("cuda", non_blocking=True) for key, x in batch.items()}
        assert moved["vectors"].device.type == "cuda"
        check(moved, [*range(5)])


def test_gradients_reach_the_samples():
    x = torch.randn(3, 2, requires_grad=True)
    jm.collate([{"x": x}, {"x": x[:1]}])["x"].values.sum().backward()
    assert x.grad.tolist() == [[2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]


ONE = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "samples must have at least one sample, got none"),
        ([{"x": 1}, [1]], TypeError, r"samples\[1\] must be a dictionary, got list"),
        (
            [{"x": 1, "y": 2}, {"x": 1}],
            ValueError,
            r"samples\[1\] must have the keys of samples\[0\], \['x', 'y'\], got \['x'\]",
        ),
        ([{"x": 1}, {"x": 1, "y": 2}], ValueError, r"samples\[1\] must have the keys of .*'y'\]"),
        (
            [{"x": ONE}, {"x": ONE}, {"x": [1, 2]}],
            TypeError,
            r"samples\[2\]\['x'\] must be a tensor or a number, got list",
        ),
        (
            [{"x": ONE}, {"x": ONE.T}],
            ValueError,
            r"samples\[1\]\['x'\] must be torch.float32 \[n, 3\] on cpu as samples\[0\]\['x'\], got"
            r" torch.float32 \[n, 2\] on cpu",
        ),
        ([{"x": ONE}, {"x": ONE.int()}], ValueError, r"got torch.int32 \[n, 3\] on cpu"),
        ([{"x": ONE}, {"x": ONE.to("meta")}], ValueError, r"got torch.float32 \[n, 3\] on meta"),
        ([{"x": 1.0}, {"x": ONE}], ValueError, r"must be torch.float32 \[\] on cpu as"),
        ([{"x": 1.0}, {"x": 1}], ValueError, r"got torch.int64 \[\] on cpu"),
    ],
)
def test_bad_input(samples, error, message):
    with pytest.raises(error, match=message):
        jm.collate(samples)
