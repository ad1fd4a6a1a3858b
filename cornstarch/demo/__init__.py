"""A small run on real data that ships with the package: images, sounds and text in one model. No torch.

The data are 1,797 handwritten digits and 640 spoken vowels; DATA_LICENSES.md says whose they are. The run is an
ordinary one: `demo.yaml` describes it, and its sources are the functions below.
"""

from cornstarch.demo.config import CONFIG, TOKENIZER, demo_config
from cornstarch.demo.examples import write_demo
from cornstarch.demo.samples import digits, parity, speakers

__all__ = ["CONFIG", "TOKENIZER", "demo_config", "digits", "parity", "speakers", "write_demo"]
