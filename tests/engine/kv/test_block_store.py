"""KV block files: written atomically, bounded and private."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv.block_store import MODEL_SIZE, BadBlock, BlockStore

MODEL = b"m" * MODEL_SIZE
KEY, OTHER = MODEL + b"\0" + b"k" * 16, MODEL + b"\0" + b"o" * 16
CONTENT = bytes(range(256)) * 4


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def store(root: Path) -> Iterator[BlockStore]:
    store = BlockStore(root, 1 << 20, outlives_users=True)
    yield store
    store.close()


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_written_blocks_are_read_by_later_store(store: BlockStore, root: Path) -> None:
    assert store.read(KEY) is None
    assert store.write(KEY, CONTENT)
    assert not store.write(KEY, CONTENT)
    store.close()
    later = BlockStore(root, 1 << 20, outlives_users=True)
    assert later.read(KEY) == CONTENT
    later.close()


def test_blocks_of_other_model_are_not_found(store: BlockStore) -> None:
    store.write(KEY, CONTENT)
    assert store.read(b"n" * MODEL_SIZE + KEY[MODEL_SIZE:]) is None


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"x",
     lambda data: b"something else", lambda data: data + b"x"],
)  # fmt: skip
def test_a_damaged_file_is_removed(damage: object, store: BlockStore, root: Path) -> None:
    store.write(KEY, CONTENT)
    (path,) = files(root)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(BadBlock, match="damaged"):
        store.read(KEY)
    assert store.read(KEY) is None
    assert store.write(KEY, CONTENT)


def test_content_of_other_block_is_rejected(store: BlockStore, root: Path) -> None:
    store.write(KEY, CONTENT)
    (path,) = files(root)
    store.write(OTHER, CONTENT[::-1])
    (other,) = set(files(root)) - {path}
    other.write_bytes(path.read_bytes())
    with pytest.raises(BadBlock):
        store.read(OTHER)


def test_the_least_recently_used_blocks_make_room(root: Path) -> None:
    limit = 20 * 1100
    store = BlockStore(root, limit, outlives_users=True)
    keys = [MODEL + bytes([0, n]) for n in range(60)]
    for age, key in enumerate(keys):
        store.write(key, CONTENT)
        for path in files(root):  # simulates the passing of a second
            status = path.stat()
            os.utime(path, (status.st_atime, status.st_mtime - 1))
        if age:
            assert store.read(keys[0]) == CONTENT, "it is used all the time"
        assert sum(path.stat().st_size for path in files(root)) <= limit
    assert store.read(keys[1]) is None
    assert store.read(keys[-1]) == CONTENT
    assert not store.write(KEY, bytes(limit)), "larger than everything"
    store.close()


def test_a_file_of_a_writer_that_died_is_removed(root: Path) -> None:
    store = BlockStore(root, 1 << 20, outlives_users=True)
    store.write(KEY, CONTENT)
    (path,) = files(root)
    left = path.with_name("aa.999999999.new")
    mine = path.with_name(f"bb.{os.getpid()}.new")
    left.touch()
    mine.touch()
    store.close()
    BlockStore(root, 1 << 20, outlives_users=True).close()
    assert mine.exists()
    assert not left.exists()


def test_the_last_user_of_shared_memory_removes_it(root: Path) -> None:
    first, second = (BlockStore(root, 1 << 20, outlives_users=False) for _ in range(2))
    first.write(KEY, CONTENT)
    first.close()
    assert second.read(KEY) == CONTENT
    second.close()
    assert not root.exists()


def test_a_directory_of_others_is_refused(root: Path) -> None:
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        BlockStore(root, 1 << 20, outlives_users=True)


def test_all_blocks_of_a_model_can_be_removed(store: BlockStore) -> None:
    store.write(KEY, CONTENT)
    store.clear(MODEL)
    assert store.read(KEY) is None
    assert store.write(KEY, CONTENT)
