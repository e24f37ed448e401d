"""Running an exported policy on a robot: numpy and onnxruntime, nothing else. Knows nothing of torch.

policy, history = open_export("policy.onnx"), History(2)
action = policy.predict_action(history.push(observation))["action"][0]
"""

from blockcache_runtime.export import ExportedPolicy, open_export
from blockcache_runtime.history import History

__all__ = ["ExportedPolicy", "History", "open_export"]
