"""JobService: what people and their tools ask. Answers only what is durable."""

from __future__ import annotations

import asyncio
import json
import secrets

from fedeval.v1 import jobs_pb2, jobs_pb2_grpc
from fedeval.wire.channel import PROTOCOL_MAX, PROTOCOL_MIN

from coordinator.core.scheduler import Scheduler
from coordinator.rpc.convert import Estimates, job_status, node
from coordinator.rpc.guard import Context, guarded, required
from coordinator.rpc.reports import report
from coordinator.runtime import Runtime
from eval_kernel import __version__
from eval_kernel.spec import JobSpec

#: How often a watch looks even if nobody woke it, in seconds: what only time changes (a silent node) shows then.
_LOOK_AGAIN = 1.0


class JobService(jobs_pb2_grpc.JobServiceServicer):
    """The servicer. ``identity`` is that of the journal."""

    def __init__(self, runtime: Runtime, identity: str) -> None:
        """Serve from a runtime."""
        self._runtime = runtime
        self._identity = identity
        self._estimates = Estimates()
        self._began = runtime.now()

    @guarded
    async def SubmitJob(self, request: jobs_pb2.SubmitJobRequest, context: Context) -> jobs_pb2.SubmitJobResponse:
        """Idempotent by key."""
        key = required(request.key, "key")
        spec = JobSpec.from_canonical(required(request.spec_json, "spec_json", longest=1 << 20))
        made = await self._runtime.submit(secrets.token_hex(6), key, spec.canonical(), spec.name or "")
        return jobs_pb2.SubmitJobResponse(job=await self._status(made.job), existed=made.existed)

    @guarded
    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        """The status now."""
        return jobs_pb2.GetJobResponse(job=await self._status(required(request.job, "job")))

    @guarded
    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsResponse:
        """Newest first."""

        def look(scheduler: Scheduler, now: float) -> list[jobs_pb2.JobStatus]:
            return [job_status(scheduler, view, self._estimates, now, with_spec=False) for view in scheduler.jobs()]

        return jobs_pb2.ListJobsResponse(jobs=await self._runtime.read(look))

    @guarded
    async def GetReport(self, request: jobs_pb2.GetReportRequest, context: Context) -> jobs_pb2.GetReportResponse:
        """As computed from the tally now."""
        job = required(request.job, "job")
        made = await self._runtime.read(lambda scheduler, now: report(scheduler, scheduler.job(job), now))
        return jobs_pb2.GetReportResponse(report_json=json.dumps(made, ensure_ascii=False, allow_nan=False))

    @guarded
    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: Context) -> jobs_pb2.CancelJobResponse:
        """A settled job stays as it is."""
        reason = request.reason[:1000]
        job = await self._runtime.cancel(required(request.job, "job"), reason)
        return jobs_pb2.CancelJobResponse(job=await self._status(job))

    @guarded
    async def WatchJob(  # type: ignore[override]  # the stub knows generators only; grpc.aio also takes context.write
        self, request: jobs_pb2.WatchJobRequest, context: Context
    ) -> None:
        """The present status, then one after each change, the settled one last."""
        job, seen = required(request.job, "job"), -1

        def look(scheduler: Scheduler, now: float) -> tuple[int, jobs_pb2.JobStatus | None]:
            view = scheduler.job(job)
            fresh = view.changed != seen
            if not fresh:
                return view.changed, None
            return view.changed, job_status(scheduler, view, self._estimates, now, with_spec=False)

        while True:
            seen, status = await self._runtime.read(look)
            if status is None:
                await self._runtime.change(_LOOK_AGAIN)
                continue
            await context.write(jobs_pb2.WatchJobResponse(job=status))
            if status.state not in (jobs_pb2.JOB_STATE_PLANNING, jobs_pb2.JOB_STATE_RUNNING):
                return
            await asyncio.sleep(self._runtime.timings.watch_interval)

    @guarded
    async def ListNodes(self, request: jobs_pb2.ListNodesRequest, context: Context) -> jobs_pb2.ListNodesResponse:
        """Every node known since the start."""
        nodes = await self._runtime.read(lambda scheduler, now: [node(view) for view in scheduler.nodes(now)])
        return jobs_pb2.ListNodesResponse(nodes=nodes)

    @guarded
    async def GetCoordinator(
        self, request: jobs_pb2.GetCoordinatorRequest, context: Context
    ) -> jobs_pb2.GetCoordinatorResponse:
        """The handshake; answered even while the journal is full."""
        return jobs_pb2.GetCoordinatorResponse(
            coordinator=self._identity,
            version=__version__,
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            uptime_seconds=self._runtime.now() - self._began,
        )

    async def _status(self, job: str) -> jobs_pb2.JobStatus:
        return await self._runtime.read(
            lambda scheduler, now: job_status(scheduler, scheduler.job(job), self._estimates, now, with_spec=True)
        )
