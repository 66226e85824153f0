"""A PPO trainer on wsync: `torchrun --nproc_per_node 2 -m integrations.ppo.train ...`; see README.md beside this."""
