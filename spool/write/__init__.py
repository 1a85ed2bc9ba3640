"""Writing: a stream's shards and tails, its commit log, sealing, and recovery of what a dead writer left.

::

    stream    one writer's stream: fills rows, rolls packs    (the API)
      |-- commit    writes what is filled, undoes what failed
      |     `-- group   who writes next, and for whom
      |-- pack      the open shard of every array, and its commit log
      |     |-- tape    one array in one pack: shard file + tail file
      |     |     |-- ring    rows that are not in the shard file yet
      |     |     `-- mover   a thread that moves long tails to the shard file
      |     `-- log     frames on disk
      |-- space     bytes asked of the hot tier in grants
      `-- sealer    a thread that seals finished packs
            `-- seal      pads, indexes and describes one; works from disk alone
                  `-- replace   files put in place together
    recover   the same seal for streams whose writer died
    folder    names, lock and metadata of a stream's folder
"""
