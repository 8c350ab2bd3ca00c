"""Files: written atomically, and checked when they are read.

    with atomic_write("result.png") as temporary: ...      any file; a link is followed, "-" is standard output
    write_text, write_json, read_json                      text and JSON
    write_tensors, read_tensors                            safetensors with one JSON entry in the header
    write_state, read_state                                nested training state (torch.save, weights_only)
    refuse_difference                                      error for other settings, naming the first difference
    locked                                                 a lock for one process; a killed process releases it

A file that cannot be read or written raises an InputError with its name. Safetensors files written here contain a
"sha256" of the header and the data. Files of other programs are read without this check.
"""

import errno
import hashlib
import json
import os
import pickle
import secrets
import shutil
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spot.errors import InputError
from spot.hashes import tensor_bytes

try:
    import fcntl
except ImportError:  # Windows has no fcntl: no locks, and leftovers are not removed
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:  # importing torch takes a second, too long for a command's --help
    from torch import Tensor

CHECKSUM = "sha256"
HIDDEN = ".spot."  # temporary files and locks begin with this; killed processes leave them behind


# Writing


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` if the block ends without an error.

    A kill, an exception or a full disk leaves the old file (or none), never a partial one. Symbolic links are
    followed, "-" is standard output, and pipes and devices are written to directly. The temporary name keeps the
    suffix, because matplotlib and others choose the format by it.
    """
    standard = str(path) in ("-", "/dev/stdout")
    # An open file under /dev or /proc, such as /dev/stderr, may be a regular one, which must not be replaced.
    opened = Path(os.path.abspath(path)).parts[1:2] in (("dev",), ("proc",))
    with disk_errors(path):
        if standard or (Path(path).exists() and (opened or not Path(path).is_file())):
            with tempfile.TemporaryDirectory() as folder:
                temporary = Path(folder) / f"out{Path(path).suffix}"
                yield temporary
                sys.stdout.flush()  # keeps the order of printed text and data
                sink = nullcontext(sys.stdout.buffer) if standard else open(path, "ab")  # noqa: SIM115
                with temporary.open("rb") as source, sink as stream:
                    shutil.copyfileobj(source, stream)
                    stream.flush()
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        # The name is fixed unless another process holds it: the leftover of a killed process is overwritten.
        name = f"{HIDDEN}{target.stem[:50]}"  # names have at most 255 bytes
        temporary = target.with_name(name + target.suffix)
        while (handle := _hold(temporary)) is None:
            temporary = target.with_name(f"{name}-{secrets.token_hex(4)}{target.suffix}")
        try:
            os.ftruncate(handle, 0)
            yield temporary
            if target.is_file():
                shutil.copymode(target, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
            os.close(handle)


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn a full disk, or one that cannot be written to, into an InputError."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of standard output has exited
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        words = ("No space left", "PytorchStreamWriter failed", "unexpected pos", "iostream error")  # torch.save's own
        full = number in (errno.ENOSPC, errno.EDQUOT) or any(word in str(error) for word in words)
        if number is None and not full:
            raise
        reason = "the disk is full" if full else os.strerror(number)  # type: ignore[arg-type]
        sentence = f"cannot write {path}: {reason}; finished work is kept, and the same command resumes"
        raise InputError(sentence) from error


def is_leftover(path: Path) -> bool:
    """Whether this is a temporary file or lock of spot, left by a killed process or in use by another."""
    return path.name.startswith(HIDDEN)


def sweep(folder: str | Path) -> None:
    """Remove the leftovers of killed processes. Those of running processes are locked and are kept."""
    for path in sorted(Path(folder).glob(f"{HIDDEN}*")):
        if path.is_file() and (handle := _hold(path)) is not None:
            path.unlink(missing_ok=True)
            os.close(handle)


# One process at a time


@contextmanager
def locked(path: str | Path, what: str = "") -> Iterator[None]:
    """Lock a file or folder during the block. If another process holds the lock, the error names it.

    The operating system releases the lock when the process ends. The lock is a hidden file in the same folder.
    """
    path = Path(os.path.realpath(path))
    name = f"{path.name[:50]}-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}.lock"  # at most 255 bytes
    lock = path / f"{HIDDEN}lock" if path.is_dir() else path.with_name(HIDDEN + name)
    with disk_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = _hold(lock)
    if handle is None:
        holder = ""
        with suppress(OSError):  # it may just have been released
            holder = lock.read_text().strip()
        holder = holder or "another process"
        raise InputError(f"{what or path} is being written by {holder}; wait for it, or choose another output")
    try:
        with suppress(OSError):  # a full disk
            os.ftruncate(handle, 0)
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, since {started}\n".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _hold(path: Path) -> int | None:
    """Create or open a file and lock it: its handle, or None if another process holds the lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            return handle  # a file system without locks
        with suppress(FileNotFoundError):  # another process removed or renamed it after it was opened here
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle
        os.close(handle)


# Text


def write_text(path: str | Path, text: str) -> None:
    """Write text in UTF-8."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, data: Any) -> None:
    """Write indented JSON."""
    write_text(path, json.dumps(data, indent=2, default=str) + "\n")


def read_json(path: str | Path, what: str = "a JSON file") -> Any:
    """Read JSON. Errors name the expected kind of file, `what`."""
    refuse_no_file(path, what)
    try:
        return json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(path, what, error) from error


def as_json(data: Any) -> Any:
    """Data after a round trip through JSON, for comparison with data read from a file."""
    return json.loads(json.dumps(data))


# Tensors


def write_tensors(
    path: str | Path, tensors: Mapping[str, "Tensor"], kind: str, about: Mapping[str, Any], **others: str
) -> None:
    """Write a safetensors file whose header contains `about` as JSON under `kind`, and the entries `others`.

    Equal content gives equal bytes, and nothing is copied. The writer of safetensors orders header entries randomly,
    and leaves files of its own behind when it is killed.
    """
    content = {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
    # Sorted by element size, largest first, which aligns every tensor; then by name.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {kind: json.dumps(about, sort_keys=True), **others}}
    end = 0
    for name in order:
        start, end = end, end + content[name].nbytes
        shape, dtype = list(tensors[name].shape), _dtype_name(tensors[name].dtype)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    entries["__metadata__"][CHECKSUM] = _checksum(entries, (content[name] for name in order))
    header = _dumped(entries)
    header += b" " * (-len(header) % 8)  # aligns the data
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines([len(header).to_bytes(8, "little"), header, *(content[name] for name in order)])


@cache
def _dtype_name(dtype: Any) -> str:
    """The name of a dtype in safetensors files: F32, BF16, I64."""
    import torch
    from safetensors.torch import save

    empty = save({"x": torch.empty(0, dtype=dtype)})
    return str(json.loads(empty[8:])["x"]["dtype"])


def read_tensors(
    path: str | Path, kind: str = "", what: str = "a safetensors file", advice: str = ""
) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
    """The tensors of a safetensors file, mapped into memory, and the `kind` entry of its header.

    Raises InputError for a damaged file and, with `kind`, for one without that entry. Errors name `what` was expected.
    """
    with _opened(path, what) as file:
        metadata = file.metadata() or {}
        if kind and kind not in metadata:
            advice = f"; {advice}" if advice else ""
            raise InputError(f"{path} is a safetensors file, but not {what}: its header has no {kind!r}{advice}")
        _verify(path, what)
        try:
            about = json.loads(metadata[kind]) if kind else {}
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise _damaged(path, what, f"{kind!r} in its header is not a JSON object")
        return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (no mapping)


def has_kind(path: str | Path, kind: str) -> bool:
    """Whether this is a safetensors file with this entry in its header."""
    try:
        return kind in (_opened(path, "").metadata() or {})
    except InputError:
        return False


def _opened(path: str | Path, what: str) -> Any:
    from safetensors import SafetensorError, safe_open

    refuse_no_file(path, what)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, what, f"not a readable safetensors file, or cut short ({error})") from error


def _checksum(entries: Mapping[str, Any], content: Iterable[Any]) -> str:
    """The checksum of a header without its checksum, and of the bytes of all tensors."""
    digest = hashlib.sha256(_dumped(entries))
    for part in content:
        digest.update(part)
    return digest.hexdigest()


def _verify(path: str | Path, what: str) -> None:
    """Compare the content of a valid safetensors file with the checksum in its header, if it has one."""
    with open(path, "rb") as file:
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        expected = entries.get("__metadata__", {}).pop(CHECKSUM, None)
        if expected is not None and _checksum(entries, iter(lambda: file.read(1 << 22), b"")) != expected:
            raise _damaged(path, what, "its content does not match its checksum")


def _dumped(entries: Mapping[str, Any]) -> bytes:
    return json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()


def encode_names(names: Iterable[str]) -> "Tensor":
    """Names as a tensor of UTF-8 bytes, separated by zero bytes. Invalid UTF-8 from file names is kept."""
    import torch

    return torch.tensor(list("\0".join(names).encode(errors="surrogateescape")), dtype=torch.uint8)


def decode_names(names: "Tensor") -> list[str]:
    return bytes(names.numpy()).decode(errors="surrogateescape").split("\0") if names.numel() else []


# Training state


def write_state(path: str | Path, state: Any) -> None:
    """Write nested dicts and lists of tensors and numbers."""
    import torch

    with atomic_write(path) as temporary:
        torch.save(state, temporary)


def read_state(path: str | Path, what: str = "a checkpoint") -> Any:
    """Read a file of write_state, or any pickle of tensors and plain values only."""
    import torch

    refuse_no_file(path, what)
    try:
        if zipfile.is_zipfile(path):  # torch writes checksums but does not verify them
            with zipfile.ZipFile(path) as file:
                if broken := file.testzip():
                    raise zipfile.BadZipFile(f"{broken} does not match its checksum")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{path} holds something other than weights, which could run code; refused") from error
    except Exception as error:  # a damaged pickle or zip raises many types: IndexError, struct.error, zlib.error …
        raise _damaged(path, what, f"not a readable pickle ({error})") from error


# Refusing


def refuse_difference(what: str, there: Mapping[str, Any], here: Mapping[str, Any], advice: str = "") -> None:
    """Raise InputError if the settings `there` and `here` differ, naming the first difference."""
    there, here = _flat(there), _flat(here)
    for name in there | here:
        if there.get(name) != here.get(name):
            sentence = f"{what} was made with {name}={there.get(name)!r}, now {name}={here.get(name)!r}"
            raise InputError(f"{sentence}; {advice}" if advice else sentence)


def refuse_no_file(path: str | Path, what: str) -> None:
    """Raise InputError if a path is missing or a folder. `what` is the expected kind of file."""
    if not Path(path).is_file():
        raise InputError(f"{what} was expected, but {path} is {'a folder' if Path(path).is_dir() else 'missing'}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _damaged(path: str | Path, what: str, trouble: object) -> InputError:
    """The error for a file that is not readable as `what`; a long reason is shortened."""
    return InputError(f"{path} is not {what}, or is damaged: {' '.join(str(trouble).split())[:200]}")
