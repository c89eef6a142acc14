"""The same training in other frameworks: what each costs beside a bare loop, and what it guarantees."""


