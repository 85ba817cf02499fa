"""Runs one command and writes what it cost as JSON: `python -S launch.py RESULT-FD COMMAND...`.

A process of its own, because the peak resident size that wait4 reports includes that of the process which
started the command: it must be smaller than anything measured.
"""

import json
import os
import sys
import time


def main() -> None:
    result = int(sys.argv[1])
    os.set_inheritable(result, False)
    started = time.monotonic()
    pid = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.monotonic() - started
    report = {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "rss": usage.ru_maxrss * 1024,
    }
    os.write(result, json.dumps(report).encode())


if __name__ == "__main__":
    main()
