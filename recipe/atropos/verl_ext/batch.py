"""verl's batches, and how they are padded and balanced across ranks."""

from verl.protocol import DataProto
from verl.utils import tensordict_utils
from verl.utils.py_functional import rename_dict
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.workers.utils.padding import no_padding_2_padding
