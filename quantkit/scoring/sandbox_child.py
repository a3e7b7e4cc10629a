"""Runs one program that a model wrote, in a process that restricts itself first.

`sandbox.py` starts this file in a separate interpreter; it imports nothing of quantkit. Before the
program runs, the process permanently gives up privileges, the network, other processes, and all
files except Python's libraries, which it may read, and its own empty folder. System limits end it
when it uses too much. If a restriction cannot be set up, that is reported, and nothing is run.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from pathlib import Path

CALLS = """
access 21 -, alarm 37 -, brk 12 214, chdir 80 49, clock_getres 229 114, clock_gettime 228 113,
clock_nanosleep 230 115, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
epoll_create1 291 20, epoll_ctl 233 21, epoll_pwait 281 22, epoll_wait 232 -, eventfd2 290 19,
exit 60 93, exit_group 231 94, faccessat 269 48, faccessat2 439 439, fadvise64 221 223,
fchdir 81 50, fcntl 72 25, fdatasync 75 83, flock 73 32, fstat 5 80, fsync 74 82,
ftruncate 77 46, futex 202 98, get_robust_list 274 100, getcpu 309 168, getcwd 79 17,
getdents 78 -, getdents64 217 61, getegid 108 177, geteuid 107 175, getgid 104 176,
getgroups 115 158, getitimer 36 102, getpid 39 172, getppid 110 173, getpriority 140 141,
getrandom 318 278, getresgid 120 150, getresuid 118 148, getrlimit 97 163, getrusage 98 165,
gettid 186 178, gettimeofday 96 169, getuid 102 174, lseek 8 62, lstat 6 -, madvise 28 233,
membarrier 324 283, mkdir 83 -, mkdirat 258 34, mmap 9 222, mprotect 10 226, mremap 25 216,
munmap 11 215, nanosleep 35 101, newfstatat 262 79, open 2 -, openat 257 56, pause 34 -,
pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, pread64 17 67, pselect6 270 72, pwrite64 18 68,
read 0 63, readlink 89 -, readlinkat 267 78, readv 19 65, rename 82 -, renameat 264 38,
renameat2 316 276, restart_syscall 219 128, rmdir 84 -, rseq 334 293, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, sched_getaffinity 204 123, sched_getparam 143 121,
sched_getscheduler 145 120, sched_yield 24 124, select 23 -, set_robust_list 273 99,
set_tid_address 218 96, setitimer 38 103, sigaltstack 131 132, stat 4 -, statx 332 291,
sysinfo 99 179, time 201 -, times 100 153, umask 95 166, uname 63 160, unlink 87 -,
unlinkat 263 35, write 1 64, writev 20 66
"""
"""System calls that a program may use, with their numbers on x86_64 and aarch64. All others fail:
sockets, new processes, signals, mounts, ioctl, and changes of limits, owners and modes.
"""
COLUMN = {"x86_64": 1, "aarch64": 2}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CAPSET = {"x86_64": 126, "aarch64": 91}
CLONE3 = 435
CLONE_THREAD = 0x10000
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ = 1 << 0 | 1 << 2 | 1 << 3
"""Execute (which loading a library needs), read files, list folders."""
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2
LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo")
SINGLE = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom")


class Breach(Exception):
    """A restriction could not be set up."""


def limit(limits: "dict[str, int]") -> None:
    """Memory, time, sizes and numbers, in the units of the system."""
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def give_up_privileges(libc: ctypes.CDLL, machine: str) -> None:
    """Drop all capabilities, and prevent gaining any by running something."""
    _call(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _call(libc.prctl(1, 9, 0, 0, 0), "a signal when quantkit ends")
    header = struct.pack("Ii", 0x20080522, 0)
    _call(libc.syscall(CAPSET[machine], header, bytes(24)), "capset")


def wall_off_files(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: libraries can be read, the folder can be written to, and nothing else is
    accessible.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise Breach("the kernel has no Landlock, which keeps a program away from files")
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    everything = (1 << bits) - 1
    attributes = struct.pack("Q", everything)
    rules = libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0)
    _call(rules, "a set of Landlock rules")
    # Not all of `sys.path`: a package under development has other files around it.
    own = [f"{base}/{name}" for base in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")]
    for path in {*LIBRARIES, *own}:
        if Path(path).is_dir():
            _allow(libc, rules, path, READ)
    for path in SINGLE:
        if Path(path).exists():
            _allow(libc, rules, path, 1 << 2)
    _allow(libc, rules, "/dev/null", 1 << 1 | 1 << 2)
    # No device files, sockets or named pipes, even in the folder.
    _allow(libc, rules, folder, everything & ~(1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1))
    _call(libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not Path(path).is_dir():
        access &= OF_FILES
    rule = struct.pack("=Qi", access, opened)
    _call(libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0), f"a Landlock rule for {path}")
    os.close(opened)


def wall_off_calls(libc: ctypes.CDLL, machine: str) -> None:
    """Seccomp: only the listed calls, and new threads but no new processes."""
    numbers = [row.split()[COLUMN[machine]] for row in CALLS.split(",")]
    steps = [
        (0x20, 0, 0, 4),  # load the architecture ...
        (0x15, 1, 0, ARCHITECTURE[machine]),
        (0x06, 0, 0, KILL),
        (0x20, 0, 0, 0),  # ... and the number of the call
        (0x35, 0, 1, 0x40000000),  # those of the other calling convention
        (0x06, 0, 0, KILL),
        (0x15, 0, 1, CLONE3),  # its flags cannot be inspected; libraries then use the older one
        (0x06, 0, 0, FAIL | ENOSYS),
        (0x15, 0, 4, CLONE[machine]),
        (0x20, 0, 0, 16),  # its flags
        (0x45, 0, 1, CLONE_THREAD),
        (0x06, 0, 0, ALLOW),
        (0x06, 0, 0, FAIL | EPERM),
    ]
    for number in numbers:
        if number != "-":
            steps += [(0x15, 0, 1, int(number)), (0x06, 0, 0, ALLOW)]
    steps.append((0x06, 0, 0, FAIL | EPERM))
    packed = b"".join(struct.pack("HBBI", *step) for step in steps)
    kept = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(kept))
    _call(libc.prctl(22, 2, program, 0, 0), "seccomp")


def _call(result: int, what: str) -> None:
    if result < 0:
        reason = os.strerror(ctypes.get_errno())
        raise Breach(f"the system does not provide {what}: {reason}")


def main() -> None:
    job = json.loads(sys.stdin.read())
    report = int(sys.argv[1])
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    try:
        machine = platform.machine()
        if machine not in COLUMN:
            raise Breach(f"the system calls of {machine} are not known")
        libc = ctypes.CDLL(None, use_errno=True)
        limit(job["limits"])
        give_up_privileges(libc, machine)
        wall_off_files(libc, job["folder"])
        wall_off_calls(libc, machine)
    except (Breach, OSError, ValueError) as error:
        os.write(report, f"walls {error}".encode())
        os._exit(1)
    try:
        exec(compile(job["program"], "<answer>", "exec"), {"__name__": "__main__"})
    except BaseException as error:
        os.write(report, f"failed {type(error).__name__}: {error}"[:400].encode(errors="replace"))
        os._exit(1)
    # A program that ends the process itself never gets here.
    os.write(report, f"passed {job['token']}".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
