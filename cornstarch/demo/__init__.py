"""A small run on real data that ships with the package: images, sounds and text in one model. No torch.

The data are 1,797 handwritten digits and 640 spoken vowels; DATA_LICENSES.md names their authors. The run is an
ordinary one: `demo.yaml` is its config, and its sources are the functions below.
"""

from cornstarch.demo.demo_files import CONFIG, TOKENIZER, demo_config, digits, parity, speakers, write_demo

__all__ = ["CONFIG", "TOKENIZER", "demo_config", "digits", "parity", "speakers", "write_demo"]
