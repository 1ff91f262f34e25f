"""IDX files: every element type, gzipped or not, and every way in which a file can be wrong."""

from __future__ import annotations

import gzip
import pathlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from distbelief.data.idx import idx
from distbelief.errors import JobError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def encoded(array: npt.NDArray[Any]) -> bytes:
    header = bytes([0, 0, CODES[array.dtype.str[1:]], array.ndim])
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(array.dtype.newbyteorder(">")).tobytes()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4) * 10
LABELS = np.array([7, 255], dtype=np.uint8)


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "images"
    path.write_bytes(encoded(IMAGES))
    return path


@pytest.mark.parametrize("element", CODES)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 3), (1, 2, 3, 1, 1)])
def test_every_element_type_and_shape(tmp_path: pathlib.Path, element: str, shape: tuple[int, ...]) -> None:
    array = np.array([0, 1, 2, 100, 101, 102]).reshape(shape).astype(element)
    (tmp_path / "file").write_bytes(encoded(array))
    tensor = idx(tmp_path / "file", normalize=False)
    assert tensor.dtype == torch.from_numpy(array.copy()).dtype
    assert np.array_equal(tensor.numpy(), array)


def test_bytes_become_images_for_a_model(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "labels").write_bytes(encoded(LABELS))
    x, y = idx(images, tmp_path / "labels")
    assert x.shape == (2, 1, 3, 4)
    assert x.dtype == torch.float32
    assert torch.equal(x[:, 0], torch.from_numpy(IMAGES) / 255)
    assert y.dtype == torch.int64
    assert y.tolist() == [7, 255]


def test_normalize_leaves_other_types_and_shapes_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "floats").write_bytes(encoded(np.ones((2, 3, 4), dtype=np.float32) * 7))
    assert idx(tmp_path / "floats").shape == (2, 3, 4)
    assert idx(tmp_path / "floats").max() == 7
    (tmp_path / "colour").write_bytes(encoded(np.full((2, 3, 4, 5), 255, dtype=np.uint8)))
    assert idx(tmp_path / "colour").shape == (2, 3, 4, 5)
    assert idx(tmp_path / "colour").max() == 1


def test_numbers_to_predict_stay_numbers(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "targets").write_bytes(encoded(np.array([0.5, 1.5], dtype=np.float32)))
    assert idx(images, tmp_path / "targets")[1].tolist() == [0.5, 1.5]


def test_gzip_is_recognised_by_content_and_found_by_name(tmp_path: pathlib.Path) -> None:
    packed = gzip.compress(encoded(IMAGES), mtime=0)
    (tmp_path / "odd-name").write_bytes(packed)
    (tmp_path / "images.gz").write_bytes(packed)
    (tmp_path / "plain.gz").write_bytes(encoded(IMAGES))
    for name in ("odd-name", "images", "images.gz", "plain", "plain.gz"):
        assert np.array_equal(idx(str(tmp_path / name), normalize=False).numpy(), IMAGES)


@pytest.mark.parametrize("name", ["a b", "a::b", "a*[1]?", "~", "ü#%20", "http:images"])
def test_local_names_have_no_hidden_meaning(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / name).write_bytes(encoded(IMAGES))
    assert len(idx(tmp_path / name)) == 2


def test_urls_work(images: pathlib.Path) -> None:
    assert len(idx(f"file://{images}")) == 2
    fsspec = pytest.importorskip("fsspec")
    with fsspec.open("memory://idx-test/labels.gz", "wb") as file:
        file.write(gzip.compress(encoded(LABELS), mtime=0))
    assert idx(images, "memory://idx-test/labels")[1].tolist() == [7, 255]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not an IDX file: it begins with nothing"),
        (b"\x00\x00", "not an IDX file"),
        (b"\x89PNG....", "not an IDX file: it begins with 89 50 4e 47"),
        (b"\x00\x00\x0a\x01" + bytes(8), "not an IDX file"),
        (b"\x00\x00\x08\x00" + bytes(8), "not an IDX file"),
        (b"\x00\x00\x08\x03\x00\x00", "truncated: its header takes 16 bytes, the file has 6"),
        (encoded(IMAGES)[:-1], "truncated: 2×3×4 elements take 40 bytes, the file has 39"),
        (encoded(IMAGES) + b"x", "damaged (too long): 2×3×4 elements take 40 bytes, the file has 41"),
        (b"\x00\x00\x08\x02" + b"\xff" * 8, "truncated: 4294967295×4294967295 elements"),
        (gzip.compress(encoded(IMAGES), mtime=0)[:-9], "gzip data cannot be unpacked"),
        (b"\x1f\x8b" + b"nonsense", "gzip data cannot be unpacked"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: pathlib.Path, content: bytes, says: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(JobError) as caught:
        idx(tmp_path / "bad")
    assert says in caught.value.message
    assert str(tmp_path / "bad") in caught.value.message


def test_a_missing_file_is_named(tmp_path: pathlib.Path, images: pathlib.Path) -> None:
    with pytest.raises(JobError, match=r"there is no file .*/nothing \(nor .*/nothing\.gz\)"):
        idx(tmp_path / "nothing")
    with pytest.raises(JobError, match=r"there is no file memory://idx-test/none"):
        idx(images, "memory://idx-test/none")
    with pytest.raises(JobError, match="cannot read"):
        idx(tmp_path)
    with pytest.raises(JobError, match="cannot read nosuchprotocol://x"):
        idx("nosuchprotocol://x")


def test_counts_must_agree(images: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "labels").write_bytes(encoded(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(JobError, match=r"has 2 images but .*labels has 5 labels"):
        idx(images, tmp_path / "labels")
