//! What each head attends to, and how much heads differ.

use crate::minilm::MiniLm;

/// Attention weights of all heads for all sentences, without the padding.
pub(crate) struct HeadMaps {
    num_heads: usize,
    /// For each sentence and head a square map, rows of queries.
    maps: Vec<Vec<f32>>,
    lengths: Vec<usize>,
}

/// How much two heads attend to the same.
pub(crate) struct Pair {
    pub(crate) a: usize,
    pub(crate) b: usize,
    /// 1 for the same weights, 0 for no key in common.
    pub(crate) overlap: f64,
}

impl HeadMaps {
    /// From packed weights (batch, heads, seqlen, seqlen).
    pub(crate) fn new(weights: &[f32], num_heads: usize, model: &MiniLm) -> Self {
        let MiniLm { seqlen, .. } = *model;
        let crop = |(i, map): (usize, &[f32])| {
            let len = model.lengths[i / num_heads];
            map.chunks(seqlen).take(len).flat_map(|row| &row[..len]).copied().collect()
        };
        let maps = weights.chunks(seqlen * seqlen).enumerate().map(crop).collect();
        Self { num_heads, maps, lengths: model.lengths.clone() }
    }

    pub(crate) fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// What a word of a sentence attends to: a weight for each word.
    pub(crate) fn row(&self, sentence: usize, head: usize, query: usize) -> &[f32] {
        let len = self.lengths[sentence];
        &self.maps[sentence * self.num_heads + head][query * len..][..len]
    }

    /// The `count` keys with the largest weights, largest first.
    pub(crate) fn top(&self, sentence: usize, head: usize, query: usize, count: usize) -> Vec<(usize, f32)> {
        let mut keys: Vec<(usize, f32)> = self.row(sentence, head, query).iter().copied().enumerate().collect();
        keys.sort_by(|a, b| b.1.total_cmp(&a.1));
        keys.truncate(count);
        keys
    }

    /// Entropy of a head's rows in bits, on average: 0 if every word attends to one, log2(len) if to all alike.
    pub(crate) fn entropy(&self, head: usize) -> f64 {
        let bits = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
        self.mean_over_rows(|sentence, query| self.row(sentence, head, query).iter().map(|&p| bits(p.into())).sum())
    }

    /// How many tokens lie between a query and what it attends to, on average.
    pub(crate) fn distance(&self, head: usize) -> f64 {
        self.mean_over_rows(|sentence, query| {
            let row = self.row(sentence, head, query).iter().enumerate();
            row.map(|(key, &p)| f64::from(p) * key.abs_diff(query) as f64).sum()
        })
    }

    /// Of every two heads.
    pub(crate) fn overlaps(&self) -> Vec<Pair> {
        let pairs = (0..self.num_heads).flat_map(|a| (a + 1..self.num_heads).map(move |b| (a, b)));
        pairs.map(|(a, b)| Pair { a, b, overlap: self.overlap(a, b) }).collect()
    }

    fn overlap(&self, a: usize, b: usize) -> f64 {
        self.mean_over_rows(|sentence, query| {
            let (a, b) = (self.row(sentence, a, query), self.row(sentence, b, query));
            a.iter().zip(b).map(|(&a, &b)| f64::from(a.min(b))).sum()
        })
    }

    /// Mean over all words of all sentences.
    fn mean_over_rows(&self, f: impl Fn(usize, usize) -> f64) -> f64 {
        let rows = || self.lengths.iter().enumerate().flat_map(|(sentence, &len)| (0..len).map(move |i| (sentence, i)));
        rows().map(|(sentence, query)| f(sentence, query)).sum::<f64>() / rows().count() as f64
    }
}
