"""Repair of a load in document order: which documents are due for it, and whether there is time for it beside the link.

Such a job costs a pass of its own, which all rows at once would share. So it is begun only where it is over, and all
that is still to be decoded as well, before the link has brought the rest.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.controller import events as ev
from kvwire.controller.in_order import beside_link, expected_rows, final_documents
from kvwire.controller.lanes import Job
from kvwire.controller.planning import Planner
from kvwire.controller.policies.base import RECOMPUTE, SLOWEST

if TYPE_CHECKING:
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.load import Load
    from kvwire.controller.policies.base import Plan


class RepairingPlanner(Planner):
    """Begins and ends repairs of documents whose rows need not wait for the last chunk."""

    def _repair(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute rows of documents that stay as they are, where the link takes longer for what is left."""
        state = load.in_order
        if not (load.is_known and state.may_begin(load.repair_share, has_looked=load.has_looked)):
            return
        if not self.lanes.is_free("prefill"):
            return
        raised = {at for at, _ in load.refine}
        last = final_documents(load.docs, state.documents, raised, looked=load.has_looked)
        if last in {state.documents, state.refused} or last == len(load.docs):
            return  # what comes after the last chunk is the closing's
        share, front = state.share or load.repair_share, load.front()
        tokens = [doc.tokens for doc in load.docs]
        rows = expected_rows(share, tokens, front, state.documents, last)
        if not rows:
            return
        seen = sum(tokens[:last])
        seconds = replace(self.costs_of(load), repair_rows=rows, repair_looks=False).repair_s(seen)
        others_s = min(self._until_others_s(load, now), self._until_closing_s(load, now))
        if seconds > min(self._beside_link_s(load, now), others_s):
            state.refused = last
            return
        for doc in load.docs[state.documents : last]:
            self._settle_document(doc, out)
        state.share, state.is_running = share, True
        load.began = self.turn()
        self.lanes.start("prefill", Job("repair", load.number, last - 1, (), now, seconds, context=seen))
        out.append(ev.Repair(load.number, last, share, front))

    def _settle_document(self, doc: DocumentState, out: list[ev.Instruction]) -> None:
        """Have a document stay as it is."""
        table = doc.table
        for chunk in range(doc.count):
            at = doc.start + chunk
            if table.valid_level[at] >= 0:
                table.top[at] = table.valid_level[at]
            self.release(doc, chunk, out)

    def _beside_link_s(self, load: Load, now: float) -> float:
        """Seconds that the engine may take for something else before what is left of a load is here."""
        table, link = load.table, self.link
        size = float(link.open_bytes + load.plan_bytes)
        cost, decode_s = self.costs_among_many(load).decode, 0.0
        for at, level in load.refine:
            size += table.sizes[level][at] - table.sizes[max(table.valid_level[at], 0)][at]
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        link_s = link.lead_s(now) + size / max(link.bandwidth, SLOWEST)
        if self._settings.workers > 1:
            return link_s
        for at, level in load.waiting:
            decode_s += cost.seconds(table.tokens[at], table.sizes[level][at])
        decode_s += (
            sum(fetch.decode_s for fetch in link.fetches.values()) + self._backlog_s(self.costs_among_many(load))[0]
        )
        return link_s - decode_s

    def repaired(self, event: ev.RepairDone, load: Load | None, now: float) -> None:
        """End a job, and learn from it.

        Args:
            event: What came of it.
            load: Whose it was; None where that is over.
            now: The instant, in seconds of the controller's clock.

        Raises:
            ArgumentError: No such job is running.
        """
        job = self.lanes.end("prefill", "repair", (), event.load, event.documents - 1, now)
        if event.rows and not event.trouble:
            costs = replace(self._estimates.costs(), repair_rows=event.rows, repair_looks=False, repair_scale=1.0)
            self._estimates.repair.add(costs.repair_s(job.context), event.seconds)
        if load is None:
            return
        state = load.in_order
        state.is_running = False
        if event.trouble:
            state.stop()
        else:
            state.documents, state.left = event.documents, event.left
        self._known_cuts = None

    def _hidden_s(self, load: Load, plan: Plan) -> float:
        """Seconds of repair that a load's first plan has at its end, and that are done beside the link."""
        if not load.in_order.may_begin(load.repair_share, has_looked=False) or (plan.levels == RECOMPUTE).any():
            return 0.0
        costs, table, share = self.costs_among_many(load), load.table, load.repair_share
        tokens, front = [doc.tokens for doc in load.docs], load.docs[0].tokens
        level = dict(load.waiting)
        works, sizes = [], []
        for doc in load.docs:
            chunks = [at for at in range(doc.start, doc.stop) if at in level]
            size = [table.sizes[level[at]][at] for at in chunks]
            sizes.append(sum(size))
            works.append(
                sum(costs.decode.seconds(table.tokens[at], each) for at, each in zip(chunks, size, strict=True))
            )
        rate, lead_s = max(self.link.bandwidth, SLOWEST), max(self.link.ttfb_s, self.link.lead_s(self._now))
        arrived = [lead_s + size / rate for size in accumulate(sizes)]

        def job_s(first: int, last: int) -> float:
            rows = expected_rows(share, tokens, front, first, last)
            return replace(costs, repair_rows=rows, repair_looks=False).repair_s(sum(tokens[:last]))

        done = beside_link(arrived, works, job_s, self._settings.workers)
        left = expected_rows(share, tokens, front, done, len(tokens))
        after = replace(costs, repair_rows=left, repair_looks=False)
        return max(0.0, costs.repair_s(load.prompt_tokens) - after.repair_s(load.prompt_tokens))
