"""The text files of an artifact, as bytes. Pure functions of the plan and the source."""

from mxconvert.writer.documents.card import CARD_NAME, model_card
from mxconvert.writer.documents.config import CONFIG_NAME, config_json
from mxconvert.writer.documents.index import INDEX_NAME, index_json

__all__ = ["CARD_NAME", "CONFIG_NAME", "INDEX_NAME", "config_json", "index_json", "model_card"]
