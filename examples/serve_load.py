"""Load on a server: clients of openpi's protocol at a steady rate, errors, times and the server's memory.

python examples/serve_load.py policy.onnx --clients 8 --minutes 10
python examples/serve_load.py policy.onnx --clients 8 --minutes 1 --kill        (killed and started again in the middle)
"""

import argparse
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from websockets.sync.client import connect

from blockcache_runtime.serve.wire import pack, unpack


def go_on(*given):
    """One client, which connects again whenever it is cut off."""
    until, lost = given[2], given[4]
    while time.monotonic() < until:
        before = len(lost)
        ask(*given)
        time.sleep(0.1 if len(lost) > before else 0.0)


def ask(port, rate, until, times, errors):
    """One client: milliseconds of each request, those beside the policy's own, and those of them within the server."""
    last = None
    try:
        with connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
            inputs, rng = unpack(connection.recv(), 10**6)["inputs"], np.random.default_rng(port)
            while time.monotonic() < until:
                given = {name: rng.random(shape, dtype=np.float32) for name, shape in inputs.items()}
                started = time.perf_counter()
                connection.send(pack(given, bytes_keys=True))
                reply = connection.recv(timeout=60)
                took = (time.perf_counter() - started) * 1e3
                if isinstance(reply, str):
                    errors.append(reply)
                else:
                    timing = unpack(reply, 10**6)["server_timing"]
                    within = timing.get("prev_total_ms", np.nan) - (last or np.nan)  # of the request before
                    last = timing["infer_ms"]
                    times.append((took, took - last, within))
                time.sleep(max(0.0, 1 / rate - took / 1e3))
    except Exception as error:
        errors.append(repr(error))


def started(policy, port):
    command = [sys.executable, "-m", "blockcache_runtime", "serve", policy, "--port", str(port), "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said = server.stdout.readline()
    print(said.strip())
    return server, int(re.search(r":(\d+) ", said)[1])


def memory(process):
    """Megabytes that a process has."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--rate", type=float, default=10.0, help="Requests a second of each client.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kill", action="store_true", help="Kill the server in the middle, and start another.")
    given = parser.parse_args()
    server, port = started(given.policy, 0)
    try:
        begun = time.monotonic()
        until = begun + 60 * given.minutes
        times, errors, sizes = [[] for _ in range(given.clients)], [], []
        client = go_on if given.kill else ask
        threads = [threading.Thread(target=client, args=(port, given.rate, until, one, errors)) for one in times]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sizes.append(memory(server.pid))
            if given.kill and time.monotonic() > (begun + until) / 2:
                before, given.kill = sum(map(len, times)), False
                server.kill()
                server.wait()
                server, _ = started(given.policy, port)
                print(f"killed after {before} requests and started again at the same port")
            time.sleep(min(10.0, 6 * given.minutes))
        for place, one in enumerate(times):
            took, beside, within = np.array(one or [(np.nan,) * 3]).T
            p50, p99 = np.percentile(took, [50, 99])
            print(
                f"client {place}: {len(one)} requests, p50 {p50:.2f}, p99 {p99:.2f} ms ({p99 / p50:.2f}), "
                f"beside the policy p50 {np.median(beside):.2f} ms, of that within the server {np.nanmedian(within):.2f} ms"
            )
        print(f"{len(errors)} errors {errors[:2]}; memory {', '.join(f'{size:.1f}' for size in sizes)} MB")
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
