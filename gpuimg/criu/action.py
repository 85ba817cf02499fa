"""What criu's action script starts: asks gpuimg for its verdict and passes it on as an exit status.

Run as `python -I -S action.py SOCKET STAGE PID`. It imports nothing of the package, so that it starts in
some 20 ms while the tasks stand still. Only a clear "ok" is success: whatever else happens, gpuimg being
gone above all, criu has to let the tasks run on (dump) or end them (restore).
"""

import socket
import sys


def main(path: str, stage: str, pid: str) -> int:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
            channel.connect(path)
            channel.sendall(f"{stage} {pid}\n".encode())
            # No time-out: gpuimg may be writing for long. When it dies the kernel closes the channel.
            answer = b""
            while not answer.endswith(b"\n"):
                data = channel.recv(16)
                if not data:
                    break
                answer += data
    except OSError as error:
        print(f"gpuimg cannot be asked at {stage}: {error}", file=sys.stderr)
        return 1
    return 0 if answer == b"ok\n" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
