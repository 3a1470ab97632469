"""Which kernels of the CUDA half calls launch, and the fewest calls that launch all of them: for tools/sanitize_gpu.py.

`python tests/kernel_survey.py survey build/kernels.json` learns it from CUPTI, on a GPU; `report` lists launched
kernels and missing ones; `run ... --part 3 --parts 30` makes the calls, split evenly.
"""

from __future__ import annotations

import argparse
import collections
import ctypes as c
import dataclasses
import functools
import glob
import hashlib
import heapq
import json
import math
import os
import random
import re
import site
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from support import frames, kernel_cases

#: As many rows each block that stays has to take, or team of threads in it: more than the ring of stages holds.
ROWS_EACH = 5

# --- names ---


def module_kernels(path: str) -> set[str]:
    """The mangled names of the kernels of a module: the strings under which it registers them, found in .rodata."""
    with open(path, "rb") as file:
        data = file.read()
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    at_names = sections[names][4]
    found = set()
    for name, _, _, _, at, length in sections:
        if data[at_names + name :].startswith(b".rodata"):
            found |= set(re.findall(rb"_ZN6jaxops\w+(?=\0)", data[at : at + length]))
    return {name.decode() for name in found}


@functools.cache
def demangle(name: str) -> str:
    """A C++ name as it is written; the name itself if it is none."""
    function = c.CDLL("libstdc++.so.6").__cxa_demangle
    function.restype, function.argtypes = c.c_void_p, [c.c_char_p, c.c_void_p, c.c_void_p, c.POINTER(c.c_int)]
    text = function(name.encode(), None, None, c.byref(c.c_int()))
    if not text:
        return name
    try:
        return c.string_at(text).decode()
    finally:
        c.CDLL(None).free(c.c_void_p(text))


_SHORTER = (
    (r"\(anonymous namespace\)::|\bjaxops::|\brows::|\bmatmul::|\bhopper::|^void ", ""),
    (r"\(Lay\)0", "plain"),
    (r"\(Lay\)1", "shifted"),
    (r"\(Lay\)2", "general"),
    (r"\(Given\)0", "no options"),
    (r"\(Given\)1", "masks"),
    (r"\(Given\)2", "any options"),
    (r"\((Major|Schedule)\)", r"\1 "),
    ("__nv_bfloat16", "bf16"),
    ("__half", "f16"),
    (r"\bfloat\b", "f32"),
    (r"\bdouble\b", "f64"),
    (" >", ">"),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel by its name and its template's arguments, without namespaces."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    @functools.cache
    def of(cls, mangled: str) -> Kernel:
        text = demangle(mangled)
        for pattern, shorter in _SHORTER:
            text = re.sub(pattern, shorter, text)
        parts, depth = [""], 0
        for letter in text:
            depth += (letter in "<(") - (letter in ">)")
            if depth == 0 and letter == ">":
                break
            if letter == "(" and depth == 1:  # not a template
                break
            if depth == 1 and letter in "<,":
                parts.append("")
            else:
                parts[-1] += letter
        return cls(parts[0], tuple(part.strip() for part in parts[1:]))

    @property
    def placement(self) -> str:
        """Who shares a row; empty if it is no kernel over rows."""
        return self.arguments[0] if self.name in ("RowKernel", "RowSumsKernel", "RowStreamKernel") else ""

    def _numbers(self) -> tuple[bool, list[int]]:
        found = re.search(r"(Along|Across)<([\d, ]+)>", self.placement)
        numbers = [int(n) for n in found[2].split(",")] if found else []
        return bool(found and found[1] == "Along"), numbers + [1] * (5 - len(numbers))

    @property
    def cluster(self) -> int:
        """Blocks that share a row."""
        return self._numbers()[1][3] if self.placement else 1

    @property
    def weight(self) -> float:
        """What a launch costs under racecheck, next to one without clusters."""
        along, numbers = self._numbers()
        if self.cluster < 8:
            return 1
        threads = max(numbers[0], 128) if along else numbers[0] * numbers[1]
        return (10 if self.cluster == 16 else 3) * threads / 256

    @property
    def stays(self) -> bool:
        """Whether blocks take one row after the other."""
        return self.name in ("RowSumsKernel", "RowStreamKernel")

    @property
    def block_rows(self) -> int:
        """Rows of adjacent elements that a block works on at once."""
        along, numbers = self._numbers()
        return max(128 // numbers[0], 1) * numbers[2] if along else 1

    @property
    def family(self) -> str:
        """The kernels among which this one differs by its placement, or by its arguments alone."""
        if not self.placement:
            return self.name
        _, pack, lay, _, op = self.arguments
        return f"{self.name} {op}, {lay}, packs of {pack}"

    @property
    def sharing(self) -> str:
        """What says how its threads share memory, whatever the dtypes and the op."""
        lay = self.arguments[2] if self.placement else ""
        return f"{self.name} {', '.join(self.arguments[:1])} {lay}".strip()

    @property
    def member(self) -> str:
        return self.placement or ", ".join(self.arguments) or "itself"

    def __str__(self):
        return f"{self.family}: {self.member}"


def grouped(mangled: Iterable[str]) -> dict[str, list[str]]:
    """The kernels of each family."""
    families = collections.defaultdict(list)
    for kernel in map(Kernel.of, mangled):
        families[kernel.family].append(kernel.member)
    return {family: sorted(members) for family, members in sorted(families.items())}


# --- the survey ---


@dataclasses.dataclass
class Surveyed:
    """A call, the kernels that it launches (after a space, the part of the kernel), and its rough cost under a tool."""

    call: frames.Call
    kernels: frozenset[str]
    cost: float

    def to_json(self) -> dict:
        call, attributes = self.call, {}
        for name, value in call.attributes.items():
            value = np.asarray(value)
            attributes[name] = [value.dtype.str, value.tolist()]
        buffers = [[[list(b.shape), b.code] for b in found] for found in (call.operands, call.results)]
        return {"call": [call.handler, *buffers, attributes], "kernels": sorted(self.kernels), "cost": self.cost}

    @classmethod
    def from_json(cls, saved: dict) -> Surveyed:
        handler, operands, results, attributes = saved["call"]
        buffers = (tuple(frames.Operand(tuple(s), code) for s, code in found) for found in (operands, results))
        values = {name: np.array(value, dtype)[()] for name, (dtype, value) in attributes.items()}
        return cls(frames.Call(handler, *buffers, values), frozenset(saved["kernels"]), saved["cost"])


def cost(launches: Iterable[tuple[str, int]], elements: int) -> float:
    """What launches on so many blocks cost."""
    return sum(Kernel.of(name).weight * (1 + blocks / 512) for name, blocks in launches) + elements / (1 << 20)


class _CallbackData(c.Structure):
    _fields_ = [
        ("site", c.c_int),
        ("function", c.c_char_p),
        ("parameters", c.c_void_p),
        ("returned", c.c_void_p),
        ("symbol", c.c_char_p),
    ]


class Launches:
    """The kernels that are launched while it is there, with their blocks: from CUPTI's callbacks, as `found`."""

    _KERNEL, _KERNEL_EX = (307, 442), (652, 653)  # CUPTI's numbers of cuLaunchKernel and cuLaunchKernelEx

    def __init__(self):
        self.found: list[tuple[str, int]] = []
        library = self._library()
        self._callback = c.CFUNCTYPE(None, c.c_void_p, c.c_int, c.c_uint32, c.POINTER(_CallbackData))(self._launched)
        subscriber = c.c_void_p()
        self._check("cuptiSubscribe", library.cuptiSubscribe(c.byref(subscriber), self._callback, None))
        for number in (*self._KERNEL, *self._KERNEL_EX):
            status = library.cuptiEnableCallback(c.c_uint32(1), subscriber, c.c_int(1), c.c_uint32(number))
            self._check("cuptiEnableCallback", status)

    @staticmethod
    def _check(function: str, status: int) -> None:
        if status:
            raise RuntimeError(f"{function}: CUPTI error {status}")

    @staticmethod
    def _library() -> c.CDLL:
        folders = [f"{path}/nvidia/*/lib" for path in (*site.getsitepackages(), *sys.path) if path]
        for toolkit in (os.environ.get("CUDA_HOME", "/usr/local/cuda"), "/usr/local/cuda*"):
            folders += [f"{toolkit}/extras/CUPTI/lib64", f"{toolkit}/lib64", f"{toolkit}/targets/*/lib"]
        names = [path for folder in folders for path in glob.glob(f"{folder}/libcupti.so.*")]
        names.sort(key=lambda name: ".so.13" not in name and ".so.2025" not in name)
        for name in ("libcupti.so.13", "libcupti.so", *names):
            try:
                return c.CDLL(name)
            except OSError:
                continue
        raise OSError("libcupti.so is not found: it comes with the CUDA toolkit and as nvidia-cuda-cupti")

    def _launched(self, _, domain, number, data):
        entered = data.contents
        if entered.site != 0:
            return
        if number in self._KERNEL:  # the parameters are the function and the grid's sizes
            blocks = c.cast(entered.parameters + 8, c.POINTER(c.c_uint))[0]
        else:  # they begin with a pointer to the configuration, which begins with the grid's sizes
            blocks = c.cast(entered.parameters, c.POINTER(c.POINTER(c.c_uint)))[0][0]
        self.found.append((entered.symbol.decode(), blocks))


class Memory:
    """Buffers one behind the other in reused device memory; its contents do not matter."""

    def __init__(self, device: frames.Device | frames.Host):
        self._device, self._size, self._base = device, 0, 0

    def place(self, call: frames.Call) -> tuple[list[int], list[int]]:
        """The addresses of the operands and of the results."""
        buffers, offsets, end = (*call.operands, *call.results), [], 0
        for buffer in buffers:
            offsets.append(end)
            end += buffer.bytes // 256 * 256 + 512
        if end > self._size:
            if self._base:
                self._device.free(self._base)
            self._size = max(end, 1 << 28)
            self._base = self._device.allocate(self._size)
        addresses = [self._base + offset for offset in offsets]
        return addresses[: len(call.operands)], addresses[len(call.operands) :]


def enough_rows(name: str, blocks: int, rows: int) -> bool:
    """Whether blocks that stay take several rows each."""
    kernel = Kernel.of(name)
    return not kernel.stays or rows >= ROWS_EACH * (blocks // kernel.cluster) * kernel.block_rows


def total_rows(call: frames.Call) -> int:
    """The rows of a row op's call; 0 of others."""
    shape, axes = call.operands[0].shape, call.attributes.get("axes")
    return 0 if axes is None else math.prod(d for a, d in enumerate(shape) if a not in axes)


def explore(launched: Callable[[int], frozenset[str]], least: int, most: int) -> None:
    """Tries numbers of rows: both ends, and between any two that launch different kernels, until they lie close."""
    pending = [(least, launched(least), most, launched(most))] if most > least else [(least, launched(least), 0, None)]
    while pending:
        low, at_low, high, at_high = pending.pop()
        middle = math.isqrt(low * high)
        if at_low == at_high or high < low * 1.25 or not low < middle < high:
            continue
        at_middle = launched(middle)
        pending += [(low, at_low, middle, at_middle), (middle, at_middle, high, at_high)]


def survey(path: str, module: str, seconds: float) -> None:
    """Runs the cases, from where another survey stopped, and writes what they launch to `path`.

    Their order is a random one: whenever the time is up, some of each kind have run.
    """
    begin = told = time.monotonic()
    launches = Launches()
    device = frames.Device()
    memory = Memory(device)
    cheapest: dict[frozenset[str], Surveyed] = {}
    refused: collections.Counter[str] = collections.Counter()
    counts = collections.Counter()
    if before := known(path, module):
        cheapest |= {entry.kernels: entry for entry in map(Surveyed.from_json, before["calls"])}
        refused |= before["refused"]
        counts["cases"] = before["cases"]

    def launched(case: kernel_cases.Case, rows: int) -> frozenset[str]:
        call = case.make(rows)
        launches.found.clear()
        counts["calls"] += 1
        try:
            frames.call_handler("cuda", call, *memory.place(call))
        except frames.HandlerError as error:
            refused[f"{call.handler}: {error}"] += 1
        try:
            device.synchronize()
        except RuntimeError as error:
            raise RuntimeError(f"{error} in {call}") from None
        good = [(name, blocks) for name, blocks in launches.found if enough_rows(name, blocks, total_rows(call))]
        kernels = frozenset(f"{name} {case.path}".strip() for name, _ in good)
        price = cost(launches.found, sum(b.bytes // b.dtype.itemsize for b in (*call.operands, *call.results)))
        if kernels and (kernels not in cheapest or price < cheapest[kernels].cost):
            cheapest[kernels] = Surveyed(call, kernels, price)
        return kernels

    cases = kernel_cases.every_case()
    random.Random(0).shuffle(cases)

    def save() -> None:
        found = {
            "of": fingerprint(module),
            "cases": counts["cases"],
            "all_cases": len(cases),
            "kernels": sorted(module_kernels(module)),
            "calls": [entry.to_json() for entry in cheapest.values()],
            "refused": dict(refused),
        }
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(f"{path}.new", "w") as file:
            json.dump(found, file)
        os.replace(f"{path}.new", path)
        taken = time.monotonic() - begin
        print(f"{counts['cases']} of {len(cases)} cases, {counts['calls']} calls in {taken:.0f} s", flush=True)

    for case in cases[counts["cases"] :]:
        now = time.monotonic()
        if now - begin >= seconds:
            break
        if now - told > 20:
            told = now
            save()
        explore(functools.partial(launched, case), case.least, case.most)
        counts["cases"] += 1
        if counts["calls"] > 100 and not cheapest:
            raise RuntimeError("CUPTI saw no kernels")
    save()


def known(path: str, module: str) -> dict | None:
    """What a survey of this module, and of these cases, wrote."""
    try:
        with open(path) as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    return found if found["of"] == fingerprint(module) else None


def fingerprint(module: str) -> str:
    """Changes with the module and with the survey's cases."""
    total = hashlib.sha256()
    for path in (module, kernel_cases.__file__, __file__):
        with open(path, "rb") as file:
            total.update(file.read())
    return total.hexdigest()


# --- the choice ---


def cover(calls: Sequence[Surveyed], of: Callable[[Surveyed], frozenset[str]]) -> list[Surveyed]:
    """A few cheap calls that together have everything that `of` finds in any."""
    every = [of(entry) for entry in calls]
    missing = frozenset().union(*every)
    queue = [(calls[i].cost / len(found), i) for i, found in enumerate(every) if found]
    heapq.heapify(queue)
    chosen = []
    while missing:
        _, i = heapq.heappop(queue)
        new = len(every[i] & missing)
        if not new:
            continue
        price = calls[i].cost / new
        if queue and price > queue[0][0]:
            heapq.heappush(queue, (price, i))
            continue
        chosen.append(calls[i])
        missing -= every[i]
    return chosen


def sharings(entry: Surveyed) -> frozenset[str]:
    """The sharings of the kernels that a call launches."""
    return frozenset(Kernel.of(name.split()[0]).sharing for name in entry.kernels)


def choose(calls: Sequence[Surveyed]) -> tuple[list[Surveyed], list[Surveyed]]:
    """A few cheap calls that together launch a kernel of every placement; more, for every kernel that any launches."""
    first = cover(calls, sharings)
    launched = frozenset().union(*(entry.kernels for entry in first))
    return first, cover(calls, lambda entry: entry.kernels - launched)


def part_of(chosen: Sequence[Sequence[Surveyed]], part: int, parts: int) -> list[Surveyed]:
    """One of equally long parts of each of the lists, one behind the other.

    In any order, so that GPU work and host work overlap.
    """
    mine = []
    for entries in chosen:
        loads, members = [(0.0, i) for i in range(parts)], [[] for _ in range(parts)]
        for entry in sorted(entries, key=lambda entry: -entry.cost):
            load, i = heapq.heappop(loads)
            members[i].append(entry)
            heapq.heappush(loads, (load + entry.cost, i))
        random.Random(part).shuffle(members[part])
        mine += members[part]
    return mine


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Kernels whose name matches an expression. matmul: whether matmul's kernels count."""

    pattern: str = ""
    matmul: bool = True

    def kernel(self, mangled: str) -> bool:
        return not self.pattern or re.search(self.pattern, str(Kernel.of(mangled.split()[0]))) is not None

    def handler(self, name: str) -> bool:
        return self.matmul or name != "matmul"


def load(path: str, of: Wanted = Wanted()) -> tuple[dict, tuple[list[Surveyed], list[Surveyed]]]:
    """What `survey` wrote, of the kernels that are wanted, and the choice among the calls that launch them."""
    with open(path) as file:
        found = json.load(file)
    found["kernels"] = [name for name in found["kernels"] if of.kernel(name)]
    calls = [Surveyed.from_json(saved) for saved in found["calls"] if of.handler(saved["call"][0])]
    return found, choose([dataclasses.replace(c, kernels=frozenset(filter(of.kernel, c.kernels))) for c in calls])


def coverage(kernels: Iterable[str], ran: Iterable[Surveyed]) -> str:
    """How many of a module's kernels calls launched, and which ones not."""
    kernels = set(kernels)
    launched = {name.split()[0] for entry in ran for name in entry.kernels}
    placed, every = ({Kernel.of(name).sharing for name in names} for names in (launched & kernels, kernels))
    never = grouped(kernels - launched)
    lines = [f"{family}:\n    {'; '.join(members)}" for family, members in never.items()]
    foreign = len(launched - kernels)
    lines.append(
        f"{len(launched & kernels)} of the module's {len(kernels)} kernels were launched, and one or more of "
        f"{len(placed)} of the {len(every)} placements, each layout by itself."
    )
    return "\n".join(lines + [f"{foreign} launched ones are not the module's."] * (foreign > 0))


def run(path: str, part: int, parts: int, seconds: float, of: Wanted) -> None:
    """Runs a part of the choice, until the time is up; prints how many calls ran, and the slowest."""
    mine = part_of(load(path, of)[1], part, parts)
    device, rng, begin, took = frames.Device(), np.random.default_rng(0), time.monotonic(), []
    for entry in mine:
        start = time.monotonic()
        if start - begin > seconds:
            break
        print(f"call of {entry.call.handler} {entry.call.operands[0].shape}", flush=True)
        frames.check_memory("cuda", device, entry.call, rng)
        took.append((time.monotonic() - start, f"{entry.call.handler} {list(entry.call.operands[0].shape)}"))
    for slow, what in sorted(took)[-3:]:
        print(f"slow: {slow:.1f} s, {what}")
    print(f"ran {len(took)} of {len(mine)} calls")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["survey", "report", "run"])
    parser.add_argument("path", help="what the survey learns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="do no more when they are over")
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--ran", type=int, nargs="*", help="how many calls of each part ran; without: all")
    parser.add_argument("--no-matmul", action="store_true", help="leave out its calls")
    parser.add_argument("--kernels", default="", metavar="PATTERN", help="those in whose name it is found")
    options = parser.parse_args(arguments)
    wanted = Wanted(options.kernels, not options.no_matmul)
    if options.command == "run":
        run(options.path, options.part, options.parts, options.seconds, wanted)
        return
    if options.command == "survey":
        from jaxops import _cuda

        before = known(options.path, _cuda.__file__)
        if not before or before["cases"] < before["all_cases"]:
            survey(options.path, _cuda.__file__, options.seconds)
    found, chosen = load(options.path, wanted)
    counts = options.ran or [sum(map(len, chosen))]
    ran = [entry for i, count in enumerate(counts) for entry in part_of(chosen, i, len(counts))[:count]]
    if options.command == "report":
        print(coverage(found["kernels"], ran))
        for refusal, count in found["refused"].items():
            print(f"{count} calls refused: {refusal}")
    (placed, price), (rest, price_of_rest) = (
        (len(entries), sum(entry.cost for entry in entries)) for entries in chosen
    )
    print(
        f"{placed} calls, of cost {price:.0f}, launch a kernel of every placement, and {rest} more, of cost "
        f"{price_of_rest:.0f}, all kernels seen in {found['cases']} of {found['all_cases']} cases."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
