"""Run with the python of ai-dynamo's environment: its simulator replays files of a request log.

python request_log_reader.py FILE...: prints what it counted, as JSON
"""

from __future__ import annotations

import json
import sys

from dynamo.replay import run_trace_replay


def main() -> None:
    report = run_trace_replay(
        sys.argv[1:], trace_format="dynamo", replay_mode="offline", router_mode="kv_router", num_workers=2
    )
    names = ("completed_requests", "total_input_tokens", "total_output_tokens")
    print(json.dumps({name: report.summary[name] for name in names}))


if __name__ == "__main__":
    main()
