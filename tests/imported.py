"""What most tests with processes of their own need, imported; `tests.forked` forks them from a process that has it.

Nothing here starts threads or computes: a fork would not have the one, and would repeat the other.
"""

import gc
from contextlib import suppress
from importlib import import_module

from PIL import Image

_NEEDED = [
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest",
    "rich._emoji_codes",
    "torch.distributed.fsdp",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.clip.image_processing_pil_clip",
    "cornstarch.cli.train",
    "cornstarch.models.multimodal_language_model.hugging_face",
    "cornstarch.parallel.low_bandwidth",
    "cornstarch.plugin",
    "cornstarch.report.run_report",
    "cornstarch.tasks.build",
    "cornstarch.trainer.trainer",
    "cornstarch.verify.twin_trial",
    "peft",
    "peft.utils.transformers_weight_conversion",
    "tests.parity.cell",
    "tests.checkpoint.numbered",
    "tests.trainer.tiny",
    "tests.zoo",
]

for _name in _NEEDED:
    with suppress(Exception):  # whoever needs it says what is wrong with it
        import_module(_name)
Image.init()  # imports what reads each kind of file
with suppress(Exception):  # transformers compiles some 900 expressions when it loads weights for the first time
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()  # collecting would touch, and so copy, what all of them share
