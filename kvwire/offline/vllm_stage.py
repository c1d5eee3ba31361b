"""Ray's vLLM stage, extended to wait until each document is stored or has failed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

OUTCOME = "outcome"
_POLL_S = 0.05
_LOST_S = 60.0
"""Seconds without any save in vLLM's workers, after which a missing outcome counts as lost."""


class Outcomes:
    """Outcomes from vLLM's workers, by document."""

    def __init__(self, ask: Any, *, lost_s: float = _LOST_S) -> None:  # noqa: ANN401 - of vLLM's engine
        """Set up; polls only while documents wait."""
        self._ask, self._lost_s = ask, lost_s
        self._done: dict[str, dict[str, Any]] = {}
        self._asking = asyncio.Lock()
        self._asked, self._busy = 0.0, time.monotonic()

    async def of(self, document: str) -> dict[str, Any]:
        """Wait for a document's outcome."""
        began = time.monotonic()
        while document not in self._done:
            await self._look()
            if document not in self._done and time.monotonic() - max(began, self._busy) > self._lost_s:
                words = "vLLM's workers did not say that they saved it; look at their log, then run again"
                return {"encode_s": 0.0, "error": "StorageError", "message": words}
            await asyncio.sleep(0 if document in self._done else _POLL_S)
        return self._done.pop(document)

    async def _look(self) -> None:
        """Poll the workers, unless another waiter just did."""
        async with self._asking:
            if time.monotonic() - self._asked < _POLL_S / 2:
                return
            answers = await self._ask("kvwire_outcomes")
            self._asked = time.monotonic()
            for answer in answers:
                self._done |= {outcome["document"]: outcome for outcome in answer["done"]}
                if answer["under_way"] or answer["done"]:
                    self._busy = self._asked


def with_outcomes(base: type) -> type:
    """Extend Ray's stage by each document's outcome."""

    class OutcomeStage(base):  # type: ignore[misc]
        async def udf(self, batch: list[dict[str, Any]]) -> Any:  # noqa: ANN401 - Ray's
            index = self.IDX_IN_BATCH_COLUMN
            names = {row[index]: json.loads(row["row"])["id"] for row in batch}
            if not hasattr(self, "outcomes"):
                self.outcomes = Outcomes(self.llm.engine.collective_rpc)
            async for answer in super().udf(batch):
                result = {"prefill_s": prefill_s(answer), "encode_s": 0.0, "error": "", "message": ""}
                if problem := answer.get("__inference_error__", ""):
                    result |= {"error": "vLLM", "message": f"vLLM did not compute it: {problem}"}
                else:
                    outcome = await self.outcomes.of(names[answer[index]])
                    result |= {name: outcome[name] for name in ("encode_s", "error", "message")}
                yield {index: answer[index], OUTCOME: json.dumps(result), "__inference_error__": ""}

    return OutcomeStage


def prefill_s(answer: dict[str, Any]) -> float:
    """Seconds of the model, from vLLM's metrics: from the prompt's first step to its token."""
    times = answer.get("metrics") or {}
    began, ended = float(times.get("scheduled_ts") or 0.0), float(times.get("first_token_ts") or 0.0)
    return max(0.0, ended - began if began else float(answer.get("time_taken_llm") or 0.0))
