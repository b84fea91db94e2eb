"""What a capture must not touch, miss or leave behind: who watches the user's program, and for what.

turns           one capture at a time; what it puts in the place of something is there for its thread alone, and undone whatever happens;
                this thread finds fakes in the model's modules, all others what lies there

what the program reads, so that a change of it is noticed before a step
    reads       attributes of modules          instances   attributes of other objects
    follower    where these and the names in code (`effects/code.py`) lead
    findings    what lay there, and what the program has done to it

what it does beside computing, told before it is frozen: done again by each step (`capture.effects`), or refused
    snapshots   to modules                     contents       to containers, attributes of classes, iterators, files, arrays
    generators  to random generators
    hooks       in hooks, to gradients         writes         to files, networks, the environment
    harm        in which order, as far as a step that fails has come
    answers     in functions that remember what they gave

afterwards
    surroundings   what the program has changed is put back where a capture fails
    leaks          no fake is left             failures       what was raised, with its line and a remedy
"""
