"""One item's way through an environment: rolled out, its rollouts merged to groups, checked, stored and sent.

Every step calls the environment's hooks, which an author may have overridden; the state that authors look at is theirs.
"""

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar, cast

from atroposlib.api.batching import can_sum
from atroposlib.envs.hooks import EnvHooks, Trajectories
from atroposlib.envs.server_handling.fan_out import contained, raise_first
from atroposlib.errors import EngineFault, KilledFault
from atroposlib.rollouts import groups as group_checks
from atroposlib.rollouts.early_stop import sample_until
from atroposlib.rollouts.failures import NO_GROUP, is_scored, logged, place_of
from atroposlib.rollouts.source import current_work, of_hook
from atroposlib.rollouts.trace import current_trace, row_of_group
from atroposlib.type_definitions import UUID, Item, JsonObject, ScoredDataGroup, ScoredDataItem, UnscoredResponse

logger = logging.getLogger(__name__)

T = TypeVar("T")
Trajectory = tuple[ScoredDataItem, list[Item]]
Collect = Callable[[Item], Awaitable[tuple[Trajectories, list[Item]]]]


async def tried_twice(roll_out: Callable[[int], Awaitable[T]], rows: Sequence[int]) -> list[T | BaseException]:
    """Roll out these rows at the same time, and those that the engine failed or killed once more, unless all were."""
    results = dict(zip(rows, await asyncio.gather(*map(roll_out, rows), return_exceptions=True), strict=True))
    again = [row for row, result in results.items() if isinstance(result, EngineFault | KilledFault)]
    if len(again) < len(results):
        more = await asyncio.gather(*map(roll_out, again), return_exceptions=True)
        results.update(zip(again, more, strict=True))
    return list(results.values())


class ItemRollout:
    """Takes the items of one environment from `running_items` to the sink."""

    def __init__(self, env: EnvHooks) -> None:
        self._env = env
        self._odd_rows = group_checks.OddRows()

    async def handle(self, item_uuid: UUID, collect: Collect, send: Callable[..., Awaitable[int]]) -> Trajectories:
        """Roll out, check, store and send the running item `item_uuid`; raises what its hooks raise.

        Args:
            collect: `collect_trajectories` of the environment.
            send: its `handle_send_to_api`.
        """
        env = self._env
        item, work = env.running_items[item_uuid]["item"], current_work.get()
        started = asyncio.get_running_loop().time()
        durations = env.failed_task_duration
        try:
            collected = await of_hook(collect(item), "collect_trajectories")
            result, backlog = collected if isinstance(collected, tuple) else (collected, [])
            if result:
                result = await env.postprocess_histories(result)
            if work:
                work.rolled_out(backlog or [])
                await asyncio.sleep(0)  # the next request goes out before this group is checked and stored
            env.backlog.extend(backlog or [])
            stored = await send(
                result,
                item,
                do_send_to_api=not env.process_mode,
                abort_on_any_max_length_exceeded=not env.process_mode,
            )
            if stored:
                durations, env.last_completed_item = env.succeeded_task_duration, item
            return result
        finally:
            seconds = asyncio.get_running_loop().time() - started
            env.task_duration.append(seconds)
            durations.append(seconds)
            env.task_successful.append(int(durations is env.succeeded_task_duration))
            with logged("cleanup failed"):  # of a group that may be stored already
                await self._clean_up()

    async def _clean_up(self) -> None:
        ended = self._env.cleanup()
        if ended is not None:  # some environments define a plain function
            limit_s = self._env.config.worker_timeout
            async with asyncio.timeout(limit_s if limit_s > 0 else None):
                await ended

    # -- a group of single rollouts --------------------------------------------------------------------------------

    async def collect_group(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        """`group_size` rollouts in parallel, or rounds of them with an early stop, as one group; see `BaseEnv`."""
        tried = 0

        async def ask(size: int) -> list[Trajectory | BaseException]:
            nonlocal tried
            first, tried = tried, tried + size
            return await self.trajectories(item, range(first, tried))

        env = self._env
        return self.merged(await sample_until(env.early_stop, env.config.group_size, ask, self._is_accepted))

    async def trajectories(self, item: Item, rows: Iterable[int]) -> list[Trajectory | BaseException]:
        """Rollouts of these rows at the same time, each or why there is none."""
        env = self._env

        async def roll_out(row: int) -> Trajectory:
            with row_of_group(row):
                result = await contained(of_hook(env.collect_trajectory(item), "collect_trajectory"))
            rollout, backlog = result if isinstance(result, tuple) else (result, [])
            if not isinstance(rollout, dict):
                raise ValueError(
                    f"collect_trajectory returned {type(rollout).__name__} for one of {env.config.group_size} "
                    "rollouts; it must return (ScoredDataItem, backlog)"
                )
            return rollout, backlog or []

        return await tried_twice(roll_out, [*rows])

    def merged(self, rollouts: list[Trajectory | BaseException]) -> tuple[ScoredDataGroup, list[Item]]:
        """The group of rollouts, without those that failed; raises the first fault where all did."""
        scored = [each for each in rollouts if not isinstance(each, BaseException)]
        faults = {index: each for index, each in enumerate(rollouts) if isinstance(each, BaseException)}
        if not scored:
            faults.clear()
            raise_first(rollouts)
        group = self._env.sized(self._env.joined([rollout for rollout, _ in scored]))
        if faults:
            size = len(group.get("scores", ()))
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": size}
            group["unscored"] = [self.unscored(fault, index) for index, fault in faults.items()]
        return group, [more for _, backlog in scored for more in backlog]

    def _is_accepted(self, each: Trajectory | BaseException) -> bool:
        if isinstance(each, BaseException):
            return False
        score = each[0].get("scores", 0.0)
        return is_scored(score) and score > self._env.config.accept_score

    def unscored(self, fault: BaseException, index: int) -> UnscoredResponse:
        """Count one response that has no score; what is recorded of it."""
        said = group_checks.unscored_response(fault, index)
        what = f"{said['error']}{place_of(fault)}"
        logger.warning("response left out: class=%s index=%d error=%s", said["failure"], index, what)
        work, run = current_work.get(), self._env.current_run
        if run and work:
            run.failures.add_response(work, fault, index)
        traceback.clear_frames(fault.__traceback__)  # they hold the rollout, which holds the fault
        return said

    # -- groups to the sink ----------------------------------------------------------------------------------------

    async def submit(self, scored_data: Trajectories, item: Item, *, send: bool, abort_when_too_long: bool) -> int:
        """Check the groups of one item, store the usable ones, send them; how many were stored. See `BaseEnv`."""
        env, usable, dropped_for = self._env, list[ScoredDataGroup](), NO_GROUP
        for given in group_checks.as_groups(scored_data):
            group = self._without_unscored(given)
            reason = group_checks.reject_reason(
                group,
                group_size=env.config.group_size,
                distinct_scores=env.config.ensure_scores_are_not_same,
            )
            if reason is None:
                await self._prepare(group, item)
                usable.append(group)
            else:
                self._note_rejected(reason, group.get("scores", []))
                dropped_for = reason
        run = env.current_run
        if run is None:
            return 0
        work = current_work.get() or run.work_outside(item)
        if not usable:
            await run.sink.reject(work, dropped_for)
            return 0
        sends = [send and self.fits(group, abort_when_too_long) for group in usable]
        stored = await run.sink.store(usable, work, send=sends)
        env.items_sent_this_step += len(usable)
        if env.process_mode:
            env.curr_step += 1
        return stored

    def _without_unscored(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The group itself, or that of the rows that can be used when a fault of one must not cost the others."""
        group_checks.check_shape(group)
        odd = group_checks.make_rows_plain(cast(JsonObject, group))
        faults = {**group_checks.row_faults(group), **odd}
        if not faults:
            return group
        if len(faults) == len(group.get("scores", ())):
            raise_first(list(faults.values()))
        return group_checks.without_rows(group, faults, group_size=self._env.config.group_size, note=self.unscored)

    async def _prepare(self, group: ScoredDataGroup, item: Item) -> None:
        env = self._env
        group_checks.share_params(group)
        for key in group_checks.OPTIONAL_KEYS:
            group.setdefault(key, None)
        env.completion_lengths.extend(group_checks.unmasked_lengths(group))
        if env.config.include_messages or (env.current_run and env.current_run.files):
            trace = current_trace()
            missing = group_checks.fill_messages(cast(JsonObject, group), trace.chats if trace else None)
            self._odd_rows.note(group_checks.NO_CHAT, missing)
        await env.add_rollouts_for_wandb(group, item)

    def _note_rejected(self, reason: str, scores: Sequence[float]) -> None:
        if run := self._env.current_run:
            run.progress.dropped.note(reason, list(map(float, scores)))
        logger.log(
            logging.WARNING if reason != group_checks.EQUAL_SCORES else logging.DEBUG, "group dropped: %s", reason
        )

    def fits(self, group: ScoredDataGroup, abort_when_too_long: bool) -> bool:
        """True where the trainer takes a group of this size with sequences this long; unknown counts as yes."""
        env, config = self._env, self._env.config
        size, batch_size = len(group.get("scores", ())), config.batch_size
        if env.early_stop.is_on and size != config.group_size:
            return False
        if group.get("unscored") and batch_size > 0 and not can_sum({config.group_size}, batch_size, size):
            logger.warning("group not sent: sequences=%d never add up to batch_size=%d", size, batch_size)
            return False
        longest = group_checks.longest_sequence(group)
        if env.max_token_len <= 0 or longest < env.max_token_len or not abort_when_too_long:
            return True
        logger.warning("group not sent: longest_sequence=%d trainer_max_token_len=%d", longest, env.max_token_len)
        if env.current_run:
            dropped = env.current_run.progress.dropped
            dropped.withheld, dropped.longest = dropped.withheld + 1, max(dropped.longest, longest)
        return False
