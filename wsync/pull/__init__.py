"""Workers read what they need where trainer ranks have it: from shard to parameter, without a gather and without slots.

connect     every worker reads a few bytes of every rank; each tensor is pulled, or else travels in buckets
each sync   ranks look their memory up; whatever is new goes to the workers; they read, cast and write
"""
