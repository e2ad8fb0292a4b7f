"""The engine process: `python -m bireme.engines.worker --worker decode --endpoint ipc:///run/x ...`.

Recipe and override come from the environment as load_recipe reads them (a supervisor hands its own
recipe over instead, see stub/environment.py), the run folder from BIREME_RUN_DIR. By hand, leave --parent out.
Nothing heavy is imported before the process is tied to its parent (own_process.py).
"""

from __future__ import annotations

import argparse

from bireme.own_process import die_with_parent, end_process, load_with_little_gc


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.parent:
        die_with_parent(options.parent)
    load_with_little_gc()
    from bireme.engines.registry import prepare, process_of

    create_process = process_of(options.worker)
    endpoint, life = options.endpoint, options.life
    if options.standby is not None:
        from bireme.engines.child.standby import stand_by

        if (told := stand_by(options.worker, options.standby, prepare)) is None:
            return 0
        endpoint, life = told
    return create_process(endpoint, life).run()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bireme.engines.worker", description="Runs one worker's engine.")
    parser.add_argument("--worker", required=True, help="the Triton model's name: decode, decode_1, prefill, ...")
    parser.add_argument("--endpoint", default="", help="prefix of the two sockets, e.g. ipc:///tmp/engine")
    parser.add_argument("--life", type=int, default=1, help="number of this life, unique within the worker")
    parser.add_argument("--parent", type=int, default=0, help="process id to live and die with; 0: none")
    parser.add_argument("--standby", type=int, metavar="FD", help="pipe by which endpoint and life come, later")
    options = parser.parse_args(arguments)
    if not options.endpoint and options.standby is None:
        parser.error("give --endpoint")
    return options


if __name__ == "__main__":
    end_process(main())
