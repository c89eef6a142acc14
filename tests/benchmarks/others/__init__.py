"""The same training in other frameworks: their costs relative to a bare loop, and their guarantees."""


