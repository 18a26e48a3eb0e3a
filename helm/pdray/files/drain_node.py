"""preStop hook of a Ray node: asks Ray to drain it, so that Serve replaces its replicas and lets their streams end.

    drain_node.py LIMIT_S

Returns when the raylet has gone, or after LIMIT_S. Ray offers the call to its command line only, not as a stable API;
where it changes, this says so and returns at once, and the pod stops as it would have without it.
"""

import socket
import sys
import time
import urllib.request

RAYLET_URL = "http://127.0.0.1:52365/api/local_raylet_healthz"
POLL_S = 1.0


def ask_to_drain(limit_s: float) -> str:
    """Empty where Ray has accepted; else the reason why not."""
    try:
        import ray
        from ray._private import services
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2
    except ImportError as exc:
        return f"this Ray cannot be asked: {exc}"
    address = services.canonicalize_bootstrap_address_or_die("auto")
    here = services.get_node_ip_address(address)
    gcs = GcsClient(address=address)
    nodes = gcs.get_all_node_info(timeout=10)
    mine = [node_id.hex() for node_id, node in nodes.items() if node.node_manager_address == here and node.state == 0]
    if len(mine) != 1:
        return f"{len(mine)} live Ray nodes at {here} ({socket.gethostname()}), Ray {ray.__version__}"
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + limit_s) * 1000)
    accepted, why = gcs.drain_node(mine[0], reason, "the pod is being stopped", deadline_ms)
    return "" if accepted else str(why)


def raylet_lives() -> bool:
    try:
        with urllib.request.urlopen(RAYLET_URL, timeout=2):
            return True
    except OSError:
        return False


def main() -> None:
    limit_s = float(sys.argv[1])
    deadline = time.monotonic() + limit_s
    if reason := ask_to_drain(limit_s):
        sys.exit(f"not drained: {reason}")
    while raylet_lives() and time.monotonic() < deadline:
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
