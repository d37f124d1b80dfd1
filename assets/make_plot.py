"""The README's picture and table, from finished runs: python assets/make_plot.py out0 out1 out2 (the folders given as --out)."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
print("| folder | accuracy | pass@64 | mean length |\n|---|---|---|---|")
for folder in sys.argv[1:]:
    lines = [json.loads(line) for line in Path(folder, "grpo/metrics.jsonl").open()]
    measured = [line for line in lines if "accuracy" in line]
    steps, trained = [line["step"] for line in measured], [line for line in lines if "reward" in line]
    (curve,) = axes[0].plot(steps, [line["accuracy"] for line in measured], marker="o", markersize=3, label=folder)
    axes[0].plot(
        [line["step"] for line in trained], [line["reward"] for line in trained], color=curve.get_color(), alpha=0.3
    )
    axes[1].plot([line["step"] for line in lines], [line["length"] for line in lines], label=folder)
    lengths = [line.get("held_out_length", line["length"]) for line in measured]  # before training, length is held out
    first, last = measured[0], measured[-1]
    cells = [f"{first[key]:.3f} → {last[key]:.3f}" for key in ("accuracy", "pass@64")] + [
        f"{first['length']:.1f} → {last['length']:.1f}"
    ]
    print(f"| {folder} | " + " | ".join(cells) + " |")
axes[0].set(title="accuracy: held out (dots), in training (pale)", xlabel="GRPO step", ylim=(0, 1))
axes[1].set(title="mean response length (tokens)", xlabel="GRPO step", ylim=(0, None))
for axis in axes:
    axis.grid(alpha=0.3)
axes[0].legend(loc="lower right")
figure.savefig(Path(__file__).with_name("grpo.png"), dpi=110)
