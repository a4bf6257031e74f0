"""Groups of several servers, which one machine plays: what posts, links and queues cost.

``python -m benchmarks.servers FIGURE [--json FILE] [--plot FOLDER]``. Servers are joined by emulated queues
(`moe_triton.backends.cpu.nic`): a post takes ``post_us``, one after the other, and a link carries so many
GB/s. Both are slowed by one printed factor, so that two shared cores can keep up and what is measured is the
protocol. All routes run in one process group, in random order in each iteration. A time is the last rank out
minus the first rank in.

- ``pace``: a call against what its counted bytes take on the link; int8 rows against rows as they are.
- ``posts``: one block for each peer (A2's ``fullmesh``) against posts for rows (A3's ``fullmesh_v1``), over
  BS; both against the formula, max(posts * post_us, post_us + bytes / link) + latency, since the link carries
  one message while the next one is posted; where the lines cross.
- ``mapped``: the same ranks as one server, whose windows are mapped, and as a server each; and what an idle
  NIC takes.
- ``overlap``: of a rank's own work the share that runs beside its link, and beside its posts; of the posts
  that which runs beside the link. Blocks are posted when all of them are made, and rows when all cores have
  left theirs, so of the work only what NICs copy is hidden by design; posts and link run beside each other.
- ``hierarchy``: A2's ``fullmesh`` against its ``hierarchy`` over a link so slow that what else a call takes
  is a tenth at most: the ratio that counted bytes predict, and how much of it is reached. Beside it what
  gloo's all-to-all-v would take at the link's pace, by arithmetic.
- ``stages``: hierarchy posted by AICPU, in phases, against hierarchy posted by cores while others pass tokens
  on, over the speed of the link; and from traces the share of relaying that lies beside the link.
- ``example``: the published example of A2's two ways by the model, with the bytes and posts of our plans.

What each shows: docs/benchmarks-servers.md.
"""
