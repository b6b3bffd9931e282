#!/usr/bin/env python3
"""Draws what a run learnt as one SVG: loss and accuracy of every step, and the evaluations.

    python3 scripts/curve.py runs/demo-long curve.svg

Reads `steps.jsonl` and `evals.jsonl` of the run's folder. Needs only Python.
"""
import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, GAP, TOP = 360, 200, 56, 96, 48


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


def smoothed(steps, key, window=40):
    """Returns means over the last steps, weighted by their slots, as a step of one sample is noisy."""
    points = []
    for at in range(0, len(steps), max(1, len(steps) // 200)):
        part = steps[max(0, at - window + 1) : at + 1]
        slots = sum(step["supervised"] for step in part) or 1
        points.append((steps[at]["step"], sum(step[key] * step["supervised"] for step in part) / slots))
    return points


def panel(left, title, lines, low, high):
    """Draws one chart; each line is (colour, name, points)."""
    last = max((x for _, _, points in lines for x, _ in points), default=1) or 1
    place = lambda x, y: (left + x / last * WIDTH, TOP + HEIGHT - (min(max(y, low), high) - low) / (high - low) * HEIGHT)
    parts = [f'<text x="{left}" y="{TOP - 12}">{title}</text>']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        _, y = place(0, value)
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for tick in range(5):
        x, y = place(last * tick / 4, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{last * tick / 4:.0f}</text>')
    for number, (colour, name, points) in enumerate(lines):
        path = " ".join("%.1f,%.1f" % place(x, y) for x, y in points)
        # Evaluations are dots; the dashes between them only guide the eye.
        dash = ' stroke-dasharray="2 5"' if len(points) < 40 else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        parts += ['<circle cx="%.1f" cy="%.1f" r="2.5" fill="%s"/>' % (*place(x, y), colour) for x, y in points if len(points) < 40]
        parts.append(f'<text x="{left + WIDTH}" y="{TOP + 14 + 14 * number}" text-anchor="end" fill="{colour}">{name}</text>')
    return "\n".join(parts)


def main():
    run, out = Path(sys.argv[1]), Path(sys.argv[2])
    steps, measures = rows(run / "steps.jsonl"), rows(run / "evals.jsonl")
    if not steps:
        sys.exit(f"curve: {run}/steps.jsonl holds no step; train first")
    held_out = [(row["step"], row["held_out"]) for row in measures if row.get("held_out")]
    decoded = [(row["step"], row["decoded"]["acceptance"]) for row in measures if row.get("decoded")]
    predicted = [(step, row["predicted_acceptance"]) for step, row in held_out]
    first = [(step, row["accuracy_by_position"][0] or 0.0) for step, row in held_out]
    highest = max([y for _, y in decoded + predicted] + [1.2])
    losses, accuracies = smoothed(steps, "loss"), smoothed(steps, "accuracy")
    measured = [(step, row["loss"]) for step, row in held_out]
    # The first steps of random weights would compress all others.
    worst = min(max(y for _, y in losses + measured), 10.0)
    best = max(y for _, y in accuracies + first) or 0.1
    panels = [
        ("loss in nats", [("#3b6ea5", "training", losses), ("#a5643b", "held out", measured)], 0.0, worst),
        ("accuracy", [("#3b6ea5", "training, all slots", accuracies), ("#a5643b", "held out, first slot", first)], 0.0, best),
        ("tokens per verification", [("#3b6ea5", "decoded, MT-Bench", decoded), ("#a5643b", "predicted by accuracy", predicted)], 1.0, highest),
    ]
    width, height = LEFT + len(panels) * (WIDTH + GAP) - GAP + 24, TOP + HEIGHT + 48
    body = "\n".join(panel(LEFT + at * (WIDTH + GAP), *one) for at, one in enumerate(panels))
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n<text x="{LEFT}" y="{height - 8}">optimizer steps of {run.name}</text>\n</svg>\n'
    )


if __name__ == "__main__":
    main()
