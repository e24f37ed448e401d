"""The training recipe: demonstrations in, a policy directory out."""

from blockcache_lab.training.config import TrainConfig
from blockcache_lab.training.data import TrainingError
from blockcache_lab.training.demonstrate import demonstrate
from blockcache_lab.training.loop import train
from blockcache_lab.training.pretraining import pretrain

__all__ = ["TrainConfig", "TrainingError", "demonstrate", "pretrain", "train"]
