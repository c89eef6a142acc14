"""What every metric of the hook ``fourier`` means."""

from loopscope.hooks import metric_table

FOURIER_METRICS = metric_table("""
    total_power | ΣP, P_k = 2|X_k|²/n summed over the embedding's dimensions (|X_k|²/n at k = n/2), k = 1..F, F = ⌊n/2⌋
        | [0, ∞)
        | Squared distance of the embedding's rows from their mean; 0: all tokens are embedded alike, and the other
        metrics are NaN.
    key_frequencies | the top_k frequencies k with the largest P_k (all, if F is smaller), largest first | 1..F
        | In cycles per n tokens; a model that has generalised keeps the same few of them.
    key_fractions | f_k = P_k / ΣP of the key frequencies | [0, 1], descending
        | The share of power at each key frequency.
    top_k_fraction | Σ f_k over the key frequencies | [top_k/F, 1]
        | Near top_k/F: no structure; near 1: the embedding consists of these waves (grokked).
    gini | Σᵢ (2i − F − 1)·P₍ᵢ₎ / (F·ΣP), P₍ᵢ₎ ascending | [0, 1 − 1/F]
        | 0: power is spread evenly; near 1: a few frequencies have all of it. Rises as the model generalises.
    entropy | −Σ f_k ln f_k | [0, ln F] nats | Falls as power gathers in few frequencies.
    effective_frequencies | exp(entropy) | [1, F] | How many equally strong frequencies would have this entropy.
    acquired_epochs | of each of the key frequencies the first epoch of the unbroken series of measurements, up to now,
        with f_k ≥ key_factor/F | [0, epoch], NaN
        | When the model acquired this frequency for good; NaN: it is below the threshold now. A random embedding of d
        dimensions stays below 2/F from d ≈ 32 on (seen for n = 97 and 997).
    acquired_count | number of frequencies with f_k ≥ key_factor/F now | 0..F/key_factor
        | How many frequencies the model works with.
    stride_share | Σ f_k over k in H = {j·n/s to the nearest integer, j = 1..⌊s/2⌋}, s the stride of the data's order
        | [0, 1]
        | Power at the frequencies that keep their phase from batch to batch in the order by a mod s; reported under any
        strategy, so that a random order shows what the model does by itself. Left out if no stride is known.
    stride_excess | stride_share · F/|H| | [0, F/|H|] | 1: no preference for the harmonics of the data's order.
    decoder_key_frequencies | key_frequencies of the rows 0..n − 1 of the output projection's weight | 1..F
        | The same as the embedding's: the model reads out the frequencies that it embeds.
    decoder_key_fractions | f_k of the output projection at these | [0, 1], descending | Their shares.
    decoder_top_k_fraction | Σ of decoder_key_fractions | [top_k/F, 1] | Near 1: nothing else is read.
    decoder_gini | gini of the output projection's spectrum | [0, 1 − 1/F] | Often rises before the embedding's.
    neuron_key_frequencies | key_frequencies of the outputs of the feed-forward layers' first linear maps (before the
        nonlinearity), on the pairs (a, b) of 4 random a with all b; spectrum along b, summed over a, token positions,
        neurons, layers | 1..F
        | At SNAPSHOT, in eval mode. The frequencies that the neurons respond to.
    neuron_key_fractions | f_k of this spectrum at these | [0, 1], descending | Their shares.
    neuron_top_k_fraction | Σ of neuron_key_fractions | [top_k/F, 1] | Near 1: no others are used.
    neuron_gini | gini of this spectrum | [0, 1 − 1/F] | Rises as the neurons specialise together.
    neuron_purity | mean over neurons of max_k P_k / ΣP, P the neuron's own spectrum; neurons that do not vary are left
        out | [1/F, 1]
        | Near 1: each neuron serves a single frequency.
    restricted_loss | mean cross-entropy of L̄ + Π(L) over pairs (a, b) of `rows` random a (all, if p is smaller) with
        all b; L the logits in eval mode, L̄ their mean, Π the projection onto cos and sin(2πk(a + b)/p) of the
        embedding's key frequencies k of this moment (2 dimensions each; arXiv 2301.05217) | [0, ∞)
        | How well the model does with these frequencies alone: falls while the circuit forms, long before full_loss.
    excluded_loss | mean cross-entropy of L − Π(L) over those of these pairs that are training pairs | [0, ∞), NaN
        | How well the training data are known without them: low while memorised, rises while the circuit takes over.
        NaN: no training pair among those drawn.
    full_loss | mean cross-entropy of L over the same pairs | [0, ∞) | Compare restricted_loss with it.
    full_train_loss | mean cross-entropy of L over those of the pairs that are training pairs | [0, ∞), NaN
        | Compare excluded_loss with it.
""")
