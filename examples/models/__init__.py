"""Published ranking models on the layers of jagged_modules, one a file, to read and to port from:
`train_dlrm.py --model NAME`.

Each is the head of a `RankingModel`, which looks the embeddings up, from `Inputs` to logits [C].
`PADDED` has the same models by hand, with padding: see padded.py.
"""

from .bst import BST
from .din import DIN
from .onetrans import OneTrans
from .padded import PaddedBST, PaddedDIN, PaddedOneTrans, PaddedSASRec, PaddedTransAct, PaddedWukong
from .sasrec import SASRec
from .transact import TransAct
from .wukong import Wukong

MODELS = {
    "din": DIN,
    "transact": TransAct,
    "bst": BST,
    "sasrec": SASRec,
    "onetrans": OneTrans,
    "wukong": Wukong,
}
PADDED = {
    "din": PaddedDIN,
    "transact": PaddedTransAct,
    "bst": PaddedBST,
    "sasrec": PaddedSASRec,
    "onetrans": PaddedOneTrans,
    "wukong": PaddedWukong,
}
