"""KV transfer within one process, for unit tests of engines: real leases and checks, no sockets, no files.

    network = FakeNetwork()
    prefill, decode = network.join("prefill"), network.join("decode")

Nothing expires by itself: call `expire_leases`. `hold` keeps fetches unclaimed until `resume`; `fail_with` makes every
later fetch fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bireme.disagg import DisaggregatedParams
from bireme.errors import BiremeError, EngineLostError, NotFoundError, RequestCancelledError, UnavailableError
from bireme.kv.transfer.base import Done, KvFetch, KvLayout, Lease, fetch_failure
from bireme.kv.transfer.chunks import plan_chunks
from bireme.kv.transfer.copier import Copier
from bireme.kv.transfer.exporter import check_layouts
from bireme.kv.transfer.lease import LeaseTable, TableLease
from bireme.kv.transfer.memory import RowMemory, TokenRows


class FakeNetwork:
    """The workers that can reach each other."""

    def __init__(self) -> None:
        self.members: dict[str, FakeTransfer] = {}

    def join(self, worker: str, life: int = 1, chunk_bytes: int = 4096) -> FakeTransfer:
        """Make a worker's transfer; a later life replaces an earlier one."""
        self.members[worker] = FakeTransfer(self, worker, life, chunk_bytes)
        return self.members[worker]


class FakeFetch:
    num_bytes, way = 0, "fake"

    def __init__(self, params: DisaggregatedParams, firsts: Sequence[int], rows: TokenRows, done: Done) -> None:
        self.params = params
        self.firsts = tuple(firsts)
        self.rows = rows
        self.is_cancelled = False
        self._done: Done | None = done

    def cancel(self) -> None:
        self.is_cancelled = True

    def finish(self, error: BiremeError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(error and fetch_failure(error))


class FakeTransfer:
    def __init__(self, network: FakeNetwork, worker: str, life: int, chunk_bytes: int) -> None:
        self.life = life
        self.fail_with: BiremeError | None = None
        self.layout: KvLayout | None = None
        self._network = network
        self._worker = worker
        self._chunk_bytes = chunk_bytes
        self._now = 0.0
        self._is_held = False
        self._is_closed = False
        self._copier = Copier(f"fake-kv-{worker}")
        self.leases = LeaseTable(1.0, self._copier.call, clock=lambda: self._now)

    @property
    def endpoint(self) -> str:
        return f"fake://{self._worker}/{self.life}"

    reaches_other_hosts = False

    @property
    def line_ms(self) -> tuple[float, float] | None:
        return None

    def start(self, layout: KvLayout, memory: RowMemory | None = None) -> None:
        self.layout = layout
        self._copier.start()

    def reserve(self, release: Callable[[], None]) -> Lease:
        return self.leases.reserve(release)

    def fetch(self, params: DisaggregatedParams, firsts: Sequence[int], rows: TokenRows, done: Done) -> KvFetch:
        fetch = FakeFetch(params, firsts, rows, done)
        if self._is_closed:
            self._copier.call(partial(fetch.finish, EngineLostError("the decode engine is stopping")))
        else:
            self._copier.submit(self._run(fetch))
        return fetch

    def close(self) -> None:
        self._is_closed = True
        self.leases.close()
        self._copier.close(10.0)

    def hold(self) -> None:
        self._is_held = True

    def resume(self) -> None:
        self._is_held = False

    def expire_leases(self) -> int:
        """Expire every exported or claimed lease. Returns how many."""
        self._now += 2.0
        return len(self.leases.expire())

    def _run(self, fetch: FakeFetch) -> Iterator[None]:
        error: BiremeError | None = None
        try:
            yield from self._wait(fetch)
            yield from self._copy(fetch)
        except BiremeError as failure:
            error = failure
        except Exception as failure:
            error = BiremeError(f"{type(failure).__name__}: {failure}")
        fetch.finish(error)

    def _wait(self, fetch: FakeFetch) -> Iterator[None]:
        while self._is_held:
            self._check(fetch)
            time.sleep(0.001)
            yield

    def _copy(self, fetch: FakeFetch) -> Iterator[None]:
        exporter, lease = self._claim(fetch)
        try:
            self._check(fetch)
            assert exporter.layout is not None and self.layout is not None
            layout = self.layout.of(len(fetch.firsts))
            check_layouts(exporter.layout, layout)
            plan = plan_chunks(layout, fetch.firsts, lease.num_tokens, self._chunk_bytes)
            source = lease.begin_copy()
            if source is None:
                raise NotFoundError("the KV lease has ended; prefill again")
            for chunk in plan.chunks:
                self._check(fetch)
                data = source.read(chunk.group, chunk.first, chunk.last)
                fetch.rows.write(chunk.group, chunk.first, chunk.last, data)
                yield
        except BaseException:
            lease.abort()
            raise
        finally:
            lease.end_copy()
        lease.ack()

    def _claim(self, fetch: FakeFetch) -> tuple[FakeTransfer, TableLease]:
        if self.fail_with is not None:
            raise self.fail_with
        params = fetch.params
        exporter = self._network.members.get(params.worker)
        if exporter is None or exporter._is_closed:
            raise UnavailableError(f"prefill worker {params.worker} is not running; prefill again")
        if exporter.life != params.life:
            raise NotFoundError(f"the KV lease belongs to life {params.life} of {params.worker}: prefill again")
        return exporter, exporter.leases.claim(params.lease_id, params.generation)

    def _check(self, fetch: FakeFetch) -> None:
        if fetch.is_cancelled:
            raise RequestCancelledError("the KV transfer was cancelled")
        if self._is_closed:
            raise EngineLostError("the decode engine is stopping")
