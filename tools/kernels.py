"""The kernels of a compiled CUDA half, by kind: how many, and how much machine code.

`python tools/kernels.py [MODULE]`, by default the installed one. Counts come from the names that a module registers;
sizes come from cuobjdump of the CUDA toolkit, where it is on PATH.
"""

from __future__ import annotations

import collections
import ctypes as c
import glob
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile


def sections(data: bytes) -> list[tuple[str, int, int]]:
    """Name, offset and size of each section of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    found = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    at = found[names][4]
    return [(data[at + f[0] : data.index(b"\0", at + f[0])].decode(), f[4], f[5]) for f in found]


def kernels(data: bytes) -> set[str]:
    """The mangled names of a module's kernels."""
    found: set[bytes] = set()
    for name, offset, size in sections(data):
        if name.startswith(".rodata"):
            found |= set(re.findall(rb"_ZN6jaxops\w+(?=\0)", data[offset : offset + size]))
    return {name.decode() for name in found}


def code_sizes(module: str) -> dict[str, int]:
    """Bytes of machine code of each kernel, over all architectures; nothing without cuobjdump."""
    if shutil.which("cuobjdump") is None:
        return {}
    sizes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["cuobjdump", "-xelf", "all", os.path.abspath(module)], cwd=folder, check=True, stdout=-3)
        for path in glob.glob(f"{folder}/*.cubin"):
            with open(path, "rb") as file:
                for name, _, size in sections(file.read()):
                    if name.startswith(".text._ZN6jaxops"):
                        sizes[name[6:]] += size
    return sizes


def demangle(name: str) -> str:
    """A C++ name as it is written."""
    function = c.CDLL("libstdc++.so.6").__cxa_demangle
    function.restype, function.argtypes = c.c_void_p, [c.c_char_p, c.c_void_p, c.c_void_p, c.POINTER(c.c_int)]
    text = function(name.encode(), None, None, c.byref(c.c_int()))
    return c.string_at(text).decode() if text else name


def kind(name: str) -> str:
    """Which kernel, and for rows which placement and layout: `RowKernel Along warp`."""
    text = demangle(name)
    template = re.search(r"(\w+)(?=<|\()", re.sub(r"^void |\(anonymous namespace\)::|jaxops::|\w+::", "", text))
    words = [template[1] if template else text]
    for pattern, word in (("Sharing\\)0", "warp"), ("Sharing\\)1", "block"), ("Sharing\\)2", "cluster")):
        if re.search(pattern, text):
            words.append(word)
    if words[0] in ("RowKernel", "PersistentKernel", "RowSumsKernel"):
        words += [place.lower() for place in ("Across", "Staged") if place + "<" in text]
        if re.search(r"Along<\(jaxops::rows::Sharing\)1, 0,|Across<8, 0,", text):
            words.append("streamed")
    return " ".join(words)


def installed() -> str:
    """The CUDA half of the jaxops that this Python imports."""
    spec = importlib.util.find_spec("jaxops._cuda")
    if spec is None or spec.origin is None:
        sys.exit("no CUDA half here: build it (make build CUDA=ON), or name a module")
    return spec.origin


def main(arguments: list[str]) -> None:
    """Prints a table."""
    module = arguments[0] if arguments else installed()
    with open(module, "rb") as file:
        found = kernels(file.read())
    sizes = code_sizes(module)
    rows: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name in found:
        row = rows[kind(name)]
        row[0] += 1
        row[1] += sizes.get(name, 0)
    print(f"{'kind':42} {'kernels':>8}" + (f" {'KB':>8}" if sizes else ""))
    for name, (count, size) in sorted(rows.items(), key=lambda row: -row[1][0]):
        print(f"{name:42} {count:8}" + (f" {size / 1e3:8.0f}" if sizes else ""))
    of_rows = [name for name in found if re.search(r"RowKernel|RowSums|Persistent|SplitRows|FinishRows", name)]
    print(
        f"{'rows in all':42} {len(of_rows):8}"
        + (f" {sum(sizes.get(n, 0) for n in of_rows) / 1e3:8.0f}" if sizes else "")
    )
    print(f"{'in all':42} {len(found):8}" + (f" {sum(sizes.values()) / 1e3:8.0f}" if sizes else ""))


if __name__ == "__main__":
    main(sys.argv[1:])
