"""The training recipe: demonstrations in, a policy directory out."""

from blockcache.training.config import TrainConfig
from blockcache.training.demonstrate import demonstrate
from blockcache.training.errors import TrainingError
from blockcache.training.loop import train

__all__ = ["TrainConfig", "TrainingError", "demonstrate", "train"]
