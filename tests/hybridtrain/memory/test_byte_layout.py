"""Tensors in one flat buffer: aligned, disjoint, and seen through, not copied."""

from itertools import pairwise

import pytest
import torch

from hybridtrain.memory.tier_tensor import ALIGNMENT, ByteLayout, Field, lay_out

TENSORS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5), torch.float32),
    ((), torch.float32),
    ((256,), torch.bfloat16),
    ((257,), torch.bfloat16),
    ((0, 4), torch.int8),
    ((512,), torch.int8),
    ((7,), torch.uint8),
]


def test_offsets_are_multiples_of_512_in_the_order_given() -> None:
    layout = lay_out(TENSORS)
    # 60, 4, 512, 514, 0, 512 and 7 bytes, each padded to whole units of 512
    assert [field.offset for field in layout.fields] == [0, 512, 1024, 1536, 2560, 2560, 3072]
    assert [field.num_bytes for field in layout.fields] == [60, 4, 512, 514, 0, 512, 7]
    assert layout.num_bytes == 3584
    assert ALIGNMENT == 512


def test_fields_neither_overlap_nor_leave_the_buffer() -> None:
    layout = lay_out(TENSORS)
    for field, following in pairwise(layout.fields):
        assert field.offset + field.num_bytes <= following.offset
        assert following.offset - field.offset - field.num_bytes < ALIGNMENT
    assert layout.fields[-1].offset + layout.fields[-1].num_bytes <= layout.num_bytes


def test_no_tensors_take_no_bytes() -> None:
    assert lay_out([]) == ByteLayout((), 0)


def test_a_shape_given_as_a_list_or_a_size_is_a_tuple() -> None:
    fields = lay_out([([2, 3], torch.int8), (torch.Size([4]), torch.int8)]).fields
    assert [field.shape for field in fields] == [(2, 3), (4,)]


def test_views_have_shape_and_dtype_and_share_the_buffers_memory() -> None:
    layout = lay_out(TENSORS)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(flat)
    assert [(tuple(view.shape), view.dtype) for view in views] == TENSORS
    for view, field in zip(views, layout.fields, strict=True):
        if view.numel():
            assert view.data_ptr() == flat.data_ptr() + field.offset


def test_what_is_written_to_one_view_changes_no_other() -> None:
    layout = lay_out(TENSORS)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = layout.views(flat)
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    for number, view in enumerate(layout.views(flat.clone()), start=1):
        assert (view == number).all()
    covered = torch.zeros(layout.num_bytes, dtype=torch.bool)
    for field in layout.fields:
        covered[field.offset : field.offset + field.num_bytes] = True
    assert not flat[~covered].any()  # padding stays as it was


def test_a_view_reads_the_bytes_of_its_place() -> None:
    values = torch.tensor([[1.5, -2.0]])
    flat = torch.cat([torch.zeros(512, dtype=torch.uint8), values.view(-1).view(torch.uint8)])
    assert torch.equal(Field(512, (1, 2), torch.float32).view(flat), values)


def test_a_buffer_that_is_too_short_is_an_error() -> None:
    layout = lay_out(TENSORS)
    with pytest.raises(RuntimeError):
        layout.views(torch.zeros(layout.fields[-1].offset, dtype=torch.uint8))
