"""What the demo prints: the links as a table, what repair changes, and answers side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def link_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The links as one table."""
    head = f"\n{'link':<10}{'Mbit/s':>8} | {'time to first token (s)':^30} | {'fetched':^17} | "
    head += f"{'levels':<18}{'KL':>8}{'agree':>7}"
    ways = f"{'':<10}{'':>8} | {'text':>8}{'raw KV':>10}{'kvwire':>12} | {'raw KV':>8}{'kvwire':>9} | "
    lines = [head, ways]
    for row in rows:
        times, sizes = row["ttft_s"], row["bytes"]
        lines.append(
            f"{row['name']:<10}{row['mbit_s']:>8g} | "
            f"{times['text']:>8.2f}{times['raw']:>10.2f}{times['kvwire']:>12.2f} | "
            f"{sizes['raw'] / 1e6:>6.1f}MB{sizes['kvwire'] / 1e6:>7.2f}MB | {_levels(row['decisions']):<18}"
            f"{row['kl']:>8.4f}{row['greedy_agreement']:>7.0%}{'  late' if row['missed_deadline'] else ''}"
        )
    return "\n".join(lines)


def repair_table(linking_kl: float, rows: Sequence[Mapping[str, Any]], share: float) -> str:
    """Loss of linking without and with repair, as lines."""
    title = "\nloss of linking: KL from a full prefill, over all prompts, as linked and with "
    lines = [f"{title}{share:.0%} of the rows repaired (exact caches, first prompt: {linking_kl:.4f})"]
    for row in rows:
        repaired = row["repaired"]
        lines.append(
            f"{row['name']:<10}{row['kl_from_full']:>8.4f} after {row['ttft_s']['kvwire']:.2f} s, "
            f"repaired {repaired['kl_from_full']:.4f} after {repaired['ttft_s']:.2f} s"
        )
    return "\n".join(lines)


def answer_lines(answers: Sequence[Mapping[str, str]], share: float) -> list[str]:
    """Answers side by side, as lines."""
    lines = [f"\nanswers, with {share:.0%} of the rows repaired:"] if answers else []
    for row in answers:
        same = " (the same)" if row["full"] == row["kvwire"] else ""
        lines += [f"  {row['question']}  [{row['right']}]", f"    full prefill: {row['full']}"]
        lines.append(f"    kvwire:       {row['kvwire']}{same}")
    return lines


def _levels(decisions: Sequence[Mapping[str, Any]]) -> str:
    """Number of chunks at each level, in short."""
    names = ["text" if d["action"] == "recompute" else f"L{d['level']}" for d in decisions]
    return " ".join(f"{names.count(name)}x{name}" for name in sorted(set(names)))
