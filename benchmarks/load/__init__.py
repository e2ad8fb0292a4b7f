"""Load generators that check every token they receive; shared by the benchmarks and tools/soak.py.

    workload.py   prompts, and what must come back for them
    meter.py      one request as its client sees it; totals and percentiles
    runner.py     a closed loop of n streams over any client; drops, stalls, drain
    clients.py    the ways to the engine, by name
    grpc_streams.py http_streams.py sse_streams.py token_bus.py in_process.py     one client each
    whole_answers.py openai_answers.py     unary calls; OpenAI's API, whole and streamed
    processes.py  CPU, memory and roles of a server's processes

Run as a process of its own, so that its CPU is accounted apart: python -m benchmarks.load --help
"""
