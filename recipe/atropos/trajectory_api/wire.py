"""Content type and headers of the Trajectory API's requests and answers, for client and server."""

PACKED = "application/x-atropos-groups"  # content type of records, one after the other (``data.scored_group``)
BATCH_HEADER = "Atropos-Batch"  # number of the batch in a packed answer
EPOCH_HEADER = "Atropos-Epoch"  # of a trainer's registration, in its later requests
TICKET_HEADER = "Atropos-Ticket"  # that a post of groups closes
KEY_HEADER = "Atropos-Key"  # idempotency key of a post
