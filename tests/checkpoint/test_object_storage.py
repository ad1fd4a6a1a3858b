"""Object stores: what is committed when, what a kill or an error at any request leaves, and who may write."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from cornstarch.checkpoint import CheckpointStore, object_errors, object_lock, object_storage, read_checkpoint
from cornstarch.checkpoint.object_storage import ObjectStorage
from cornstarch.checkpoint.reader import convert_checkpoint
from cornstarch.checkpoint.shards import Box
from cornstarch.checkpoint.storage import resolve_storage
from cornstarch.errors import ConfigError
from tests.checkpoint.faulty_store import Died, FailAt, FaultyStore

URL = "faulty://bucket/run"


@pytest.fixture(autouse=True)
def empty_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    FaultyStore.reset()
    monkeypatch.setattr(object_storage, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(object_storage, "PART_BYTES", 1500)  # tensors are uploaded in parts, data in one request
    yield
    FaultyStore.reset()


def save(step: int, url: str = URL, wait: bool = True) -> CheckpointStore:
    store = CheckpointStore(url, keep=1)
    store.save(step, {"w": torch.full((1000,), float(step)), "n": torch.full((3,), step)}, {"step": step}, wait=wait)
    return store


def save_step(url: str = URL) -> int:
    """Return the newest step, if every value of it says so."""
    store = CheckpointStore(url, keep=1)
    found = store.latest()
    assert found is not None and store.problems == []
    with found.tensors() as tensors:
        assert {float(one) for name in tensors for one in tensors[name].unique()} == {float(found.step)}
    assert found.data() == {"step": found.step}
    return found.step


def list_stored_names() -> set[str]:
    return {name.removeprefix("/bucket/run/").partition("/")[0] for name in FaultyStore.store}


def test_a_checkpoint_has_the_names_of_a_local_one_and_nothing_beside_it() -> None:
    save(1)
    save(2)
    assert save_step() == 2
    assert sorted(FaultyStore.store) == [
        "/bucket/run/step_00000002/checkpoint.json",
        "/bucket/run/step_00000002/data.json",
        "/bucket/run/step_00000002/tensors-00001.safetensors",
    ]
    assert read_checkpoint(f"{URL}/step_00000002").step == 2


def test_files_without_a_manifest_are_no_checkpoint() -> None:
    save(1)
    FaultyStore.hook = FailAt(10**9, Died())
    store = CheckpointStore(URL, keep=1)
    store.storage.make_folder(store.folder / "step_00000002.tmp.ab")
    store.storage.write(store.folder / "step_00000002.tmp.ab" / "data.json", [b"{}"])
    assert "/bucket/run/step_00000002/data.json" in FaultyStore.store
    assert [one.step for one in store.list()] == [1] and not store.problems
    save(2)  # removes what was left, and takes the name
    assert list_stored_names() == {"step_00000002"} and save_step() == 2


def test_a_kill_at_any_request_leaves_the_old_or_the_new_checkpoint() -> None:
    seen = []
    for number in range(1, 1000):
        FaultyStore.reset()
        save(1)
        FaultyStore.hook = hook = FailAt(number, Died())
        with suppress(Died):
            save(2)
        FaultyStore.hook = staticmethod(lambda request: None)
        seen.append(save_step())
        save(3)
        assert list_stored_names() == {"step_00000003"}, hook.request
        if hook.count < number:
            break
    assert number > 40 and seen == sorted(seen) and set(seen) == {1, 2}


@pytest.mark.parametrize(
    "error", [TimeoutError("slow"), OSError(errno.EBUSY, "SlowDown"), ConnectionResetError("reset")], ids=str
)
def test_a_transient_error_at_any_request_is_repeated(error: Exception) -> None:
    for number in range(1, 1000):
        FaultyStore.reset()
        save(1)
        FaultyStore.hook = hook = FailAt(number, error)
        save(2)
        assert save_step() == 2
        if hook.count < number:
            break
    assert number > 40


@pytest.mark.filterwarnings("ignore:.*not needed any more")  # an old checkpoint that cannot be removed stays
def test_a_refusal_at_any_request_is_explained_and_leaves_the_old_checkpoint() -> None:
    explained = 0
    for number in range(1, 1000):
        FaultyStore.reset()
        save(1)
        FaultyStore.hook = hook = FailAt(number, PermissionError("AccessDenied"))
        try:
            save(2)
        except ConfigError as error:
            assert "faulty://bucket/run" in str(error) and "AccessDenied" in str(error), hook.request
            assert "Check the credentials" in str(error) and "attempts" not in str(error)
            assert len(str(error).splitlines()) == 1
            explained += 1
        if hook.count < number:
            break
        assert save_step() in (1, 2)
        save(3)
        assert list_stored_names() == {"step_00000003"}, hook.request
    assert explained > 30


def test_a_store_that_stays_away_ends_a_background_save_with_the_reason() -> None:
    save(1)
    count = 0

    def fail(request: str) -> None:
        nonlocal count
        if "data.json" in request:
            count += 1
            raise TimeoutError("no answer")

    FaultyStore.hook = staticmethod(fail)
    store = save(2, wait=False)
    while store.is_saving:
        time.sleep(0.001)
    with pytest.raises(ConfigError, match="put faulty://bucket/run/step_00000002/data.json in 6 attempts: no answer"):
        store.check()
    assert count == object_storage.ATTEMPTS
    FaultyStore.hook = staticmethod(lambda request: None)
    assert save_step() == 1


def test_damage_is_found_before_anything_is_used() -> None:
    save(1)
    name = "/bucket/run/step_00000001/tensors-00001.safetensors"
    content = bytearray(FaultyStore.store[name].getvalue())
    content[-5] ^= 4
    FaultyStore().pipe_file(name, bytes(content))
    with pytest.raises(ConfigError, match="tensors-00001.safetensors is damaged"):
        CheckpointStore(URL, keep=1).latest()
    one = read_checkpoint(f"{URL}/step_00000001")
    with pytest.raises(ConfigError, match="damaged on the way"), one.tensors() as found:
        found["w"]


def test_only_the_files_that_are_needed_are_downloaded() -> None:
    store = CheckpointStore(URL, keep=1)
    store.save(1, {"w": torch.ones(1000), "n": torch.ones(3)}, {"step": 1})
    convert_checkpoint(store.latest(), "faulty://bucket/parts", "sharded", 4)  # type: ignore[arg-type]
    asked: list[str] = []
    FaultyStore.hook = staticmethod(asked.append)
    with read_checkpoint("faulty://bucket/parts/step_00000001").tensors() as tensors:
        assert tensors.read("w", Box((0,), (10,))).tolist() == [1.0] * 10
        downloads = [one for one in asked if one.startswith("before info") and "safetensors" in one]
        assert len(downloads) >= 1 and all("rank-0000" in one for one in downloads)


# ------------------------------------------------------------------------------------------------ who may write


def lock_content(**changes: object) -> bytes:
    return json.dumps({**json.loads(object_lock._encode("other", 0)), **changes}).encode()


def test_two_writers_in_one_process_are_refused() -> None:
    store = CheckpointStore(URL, keep=1)
    with store.claim():
        store.save(1, {"w": torch.ones(2)}, {})  # the owner itself may
        with pytest.raises(ConfigError, match="Another process is saving checkpoints in faulty:/bucket/run"):
            save(2)
    save(2)
    assert save_step() == 2


def test_a_dead_owner_on_this_machine_is_succeeded_at_once() -> None:
    FaultyStore().pipe_file("/bucket/run/.lock", lock_content(process=2**22 + 1))
    save(1)
    assert save_step() == 1


def test_a_silent_owner_elsewhere_is_succeeded_and_a_living_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lock, "EXPIRY", 0.2)
    monkeypatch.setattr(object_lock, "_POLL", 0.01)
    FaultyStore().pipe_file("/bucket/run/.lock", lock_content(machine="elsewhere", host="node-7", process=5))
    save(1)
    assert save_step() == 1
    monkeypatch.setattr(object_lock, "EXPIRY", 60.0)
    count = 0

    def renew(request: str) -> None:
        nonlocal count
        if request == "before cat_file bucket/run/.lock":
            count += 1
            content = lock_content(machine="elsewhere", host="node-7", process=5, renewals=count)
            FaultyStore.store["/bucket/run/.lock"] = FaultyStore.store["/bucket/run/.lock"].__class__(
                FaultyStore(), "/bucket/run/.lock", content
            )

    FaultyStore().pipe_file("/bucket/run/.lock", lock_content(machine="elsewhere", host="node-7", process=5))
    FaultyStore.hook = staticmethod(renew)
    with pytest.raises(ConfigError, match="process 5 on node-7"):
        save(2)


def test_a_writer_whose_lock_was_taken_over_does_not_commit() -> None:
    save(1)

    def take_over(request: str) -> None:
        if request.startswith("before pipe_file") and "step_00000002" in request and "checkpoint.json" in request:
            FaultyStore.hook = staticmethod(lambda request: None)
            FaultyStore().pipe_file("/bucket/run/.lock", lock_content(machine="elsewhere", host="node-7"))

    FaultyStore.hook = staticmethod(take_over)
    with pytest.raises(ConfigError, match="was taken over by process .* on node-7"):
        save(2)
    assert save_step() == 1
    assert json.loads(FaultyStore().cat_file("/bucket/run/.lock"))["host"] == "node-7"  # not ours to remove


def test_an_existing_object_is_never_written_over() -> None:
    storage = ObjectStorage("faulty")
    storage.write(Path("faulty:/bucket/x"), [b"mine"])
    with pytest.raises(FileExistsError, match="give each run a folder of its own"):
        storage.write(Path("faulty:/bucket/x"), [b"yours"])
    assert storage.read(Path("faulty:/bucket/x")) == b"mine"


# ------------------------------------------------------------------------------------------------ names and secrets


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:hidden@bucket/run", "Credentials are read from the environment"),
        ("s3://bucket/run?X-Amz-Signature=hidden", "without a user, a password or a query"),
        ("s3://", "expected a bucket"),
        ("nothing://me:hidden@bucket", "no storage is registered for nothing://; there is .*s3"),
        ("http://me:hidden@host/run", "no storage is registered for http://"),
    ],
)
def test_urls_with_credentials_or_without_a_bucket_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_storage(url)
    assert "hidden" not in str(caught.value)


def test_messages_hold_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    text = "GET https://me:hidden@host/b?X-Amz-Signature=hidden&b=1 with hidden-key failed"
    assert "hidden" not in object_errors.redact(text) and object_errors.redact(text).endswith("failed")
    assert object_errors.redact("What now? s3://b/c") == "What now? s3://b/c"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", fail)
    with pytest.raises(ConfigError, match=r"pip install 'cornstarch\[s3\]'"):
        CheckpointStore("s3://bucket/run", keep=1).list()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (type("Answer", (Exception,), {"status": 503})("busy"), True),
        (type("Answer", (Exception,), {"code": 429})("busy"), True),
        (type("Answer", (Exception,), {"status": 403})("no"), False),
        (type("ReadTimeoutError", (Exception,), {})("late"), True),
        (type("NoCredentialsError", (Exception,), {})("none"), False),
        (FileNotFoundError("NoSuchBucket"), False),
        (OSError(errno.EINVAL, "InvalidBucketName"), False),
        (OSError(errno.EIO, "InternalError"), True),
        (ZeroDivisionError("ours"), False),
    ],
    ids=lambda one: f"{type(one).__name__} {one}",
)
def test_errors_that_pass_are_told_from_refusals(error: Exception, expected: bool) -> None:
    assert object_errors.is_transient(error) is expected
