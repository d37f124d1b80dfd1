"""The README's pictures and tables, from finished runs (the folders given as --out):

python assets/make_plot.py grpo out0 out1 out2
python assets/make_plot.py ppo few0 few1 few2 -- out0 out1 out2        100 pairs and --beta 0; the defaults
python assets/make_plot.py dpo shot0 shot1 shot2 -- kept0 kept1 kept2  one-shot; the same labels in four rounds
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def measured_lines(folder, script):
    """All lines of a run's metrics, and those with a held-out evaluation."""
    lines = [json.loads(line) for line in Path(folder, script, "metrics.jsonl").open()]
    return lines, [line for line in lines if "accuracy" in line]


def grpo(axes, folders):
    print("| folder | accuracy | pass@64 | mean length |\n|---|---|---|---|")
    for folder in folders:
        lines, measured = measured_lines(folder, "grpo")
        steps, trained = [line["step"] for line in measured], [line for line in lines if "reward" in line]
        (curve,) = axes[0].plot(steps, [line["accuracy"] for line in measured], marker="o", markersize=3, label=folder)
        axes[0].plot(
            [line["step"] for line in trained], [line["reward"] for line in trained], color=curve.get_color(), alpha=0.3
        )
        axes[1].plot([line["step"] for line in lines], [line["length"] for line in lines], label=folder)
        # before training, length is held out
        lengths = [line.get("held_out_length", line["length"]) for line in measured]
        cells = [f"{measured[0][key]:.3f} → {measured[-1][key]:.3f}" for key in ("accuracy", "pass@64")]
        print(f"| {folder} | " + " | ".join(cells) + f" | {lengths[0]:.1f} → {lengths[-1]:.1f} |")
    axes[0].set(title="accuracy: held out (dots), in training (pale)", xlabel="GRPO step", ylim=(0, 1))
    axes[1].set(title="mean response length (tokens)", xlabel="GRPO step", ylim=(0, None))
    axes[0].legend(loc="lower right")


def ppo(axes, folders):
    cut = folders.index("--")
    print("| folder | proxy | gold, best | gold | accuracy | KL |\n|---|---|---|---|---|---|")
    titles = "100 comparisons, no leash", "4000 comparisons, beta 0.3"
    for axis, title, group in zip(axes, titles, (folders[:cut], folders[cut + 1 :])):
        for folder in group:
            _, measured = measured_lines(folder, "ppo")
            x = [line["sqrt_kl"] for line in measured]
            (curve,) = axis.plot(
                x, [line["gold"] for line in measured], marker="o", markersize=3, label=Path(folder).name
            )
            proxy = [line["held_out_reward"] for line in measured]
            axis.plot(x, proxy, marker=".", markersize=3, linestyle="--", color=curve.get_color())
            best = max(measured, key=lambda line: line["gold"])
            first, last = measured[0], measured[-1]
            print(
                f"| {folder} | {first['held_out_reward']:+.2f} → {last['held_out_reward']:+.2f} | {best['gold']:.2f} at "
                f"step {best['step']} | {first['gold']:.2f} → {last['gold']:.2f} | {first['accuracy']:.3f} → "
                f"{last['accuracy']:.3f} | {last['held_out_kl']:.1f} |"
            )
        axis.set(
            title=title, xlabel="square root of KL(policy || reference)", ylabel="gold score (solid), proxy (dashed)"
        )
        axis.legend()
    axes[1].sharex(axes[0])
    axes[1].sharey(axes[0])


def dpo(axes, folders):
    cut = folders.index("--")
    print("| folder | accuracy | gold | KL | mean length | chosen | rejected |\n|---|---|---|---|---|---|---|")
    for group, style in ((folders[:cut], "-"), (folders[cut + 1 :], "--")):
        for seed, folder in enumerate(group):
            _, measured = measured_lines(folder, "dpo")
            steps, color = [line["step"] for line in measured], f"C{seed}"
            label = "one-shot" if style == "-" else "four rounds"
            axes[0].plot(
                steps, [line["accuracy"] for line in measured], style, color=color, label=f"{label}, seed {seed}"
            )
            for key in ("chosen_logratio", "rejected_logratio") if style == "-" else ():
                axes[1].plot(
                    steps, [line[key] for line in measured], "-" if "chosen" in key else ":", color=color,
                    label=f"{key.split('_')[0]}, seed {seed}",
                )  # fmt: skip
            cells = [
                f"{measured[0][key]:{form}} → {measured[-1][key]:{form}}"
                for key, form in (("accuracy", ".3f"), ("gold", ".2f"), ("kl", ".2f"), ("length", ".1f"))
            ]
            cells += [f"{measured[-1][key]:+.2f}" for key in ("chosen_logratio", "rejected_logratio")]
            print(f"| {folder} | " + " | ".join(cells) + " |")
    axes[0].set(title="held-out accuracy", xlabel="DPO step", ylim=(0.4, 1))
    axes[1].set(title="log-probability of held-out responses\nagainst the SFT model (nats)", xlabel="DPO step")
    for axis in axes:
        axis.legend(fontsize=7)


figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
{"grpo": grpo, "ppo": ppo, "dpo": dpo}[sys.argv[1]](axes, sys.argv[2:])
for axis in axes:
    axis.grid(alpha=0.3)
figure.savefig(Path(__file__).with_name(f"{sys.argv[1]}.png"), dpi=110)
