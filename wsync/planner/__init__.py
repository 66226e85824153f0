"""What co-located training will take on each GPU, from shapes alone; nothing is loaded and no GPU is needed.

    python -m wsync.planner memory --model 7b --gpus 2 --tp 2 --gpu-mem 140

docs/planner.md says what is counted and what cannot be known.
"""

from wsync.planner.hf_config import read_config
from wsync.planner.model import Model
from wsync.planner.models import named
from wsync.planner.phases import PhasePlan, predict, predict_host, predict_moves
from wsync.planner.setting import Setting
from wsync.planner.verdict import Verdict, judge

__all__ = [
    "Model",
    "PhasePlan",
    "Setting",
    "Verdict",
    "judge",
    "named",
    "predict",
    "predict_host",
    "predict_moves",
    "read_config",
]
