//! All attention maps of a sentence in one SVG file: a row for each layer, a column for each head.

use std::path::Path;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};

use crate::heat_map::{Area, Drawn, INK, TITLE_SIZE, color_of, frame, label, label_upward, room, scale};
use crate::model::Result;

/// Side of a map in pixels, about; cells are whole ones, so that no seam shows between them.
const SIDE: i32 = 160;
const CELLS: core::ops::RangeInclusive<i32> = 2..=16;
/// Cells below which labels of tokens could not be read.
const LABELLED: i32 = 8;
const GAP: i32 = 14;
const HEADER: i32 = 66;
/// Room for the scale of colors.
const LEGEND: i32 = 150;
/// Steps of the colors, so that cells of one color beside each other are drawn at once.
const STEPS: f32 = 64.0;

/// Where everything is.
struct Grid {
    cell: i32,
    side: i32,
    /// Room for the labels at the left and at the top.
    labels: i32,
    titles: i32,
}

impl Grid {
    fn new(tokens: &[String]) -> Self {
        let count = tokens.len() as i32;
        let cell = (SIDE / count.max(1)).clamp(*CELLS.start(), *CELLS.end());
        let labels = if cell >= LABELLED { room(tokens, cell) } else { GAP };
        Self { cell, side: cell * count, labels, titles: room(&["layer 00".to_string()], TITLE_SIZE) }
    }

    /// Corner of the map of a head of a layer.
    fn map(&self, layer: usize, head: usize) -> (i32, i32) {
        let [layer, head] = [layer, head].map(|i| i as i32 * (self.side + GAP));
        (GAP + self.titles + self.labels + head, HEADER + 2 * TITLE_SIZE + self.labels + layer)
    }
}

/// Draws weights (layers, heads, tokens, tokens).
pub(crate) fn draw(
    path: &Path,
    weights: &[f32],
    [layers, heads]: [usize; 2],
    tokens: &[String],
    sentence: &str,
) -> Result<()> {
    let grid = Grid::new(tokens);
    let (right, bottom) = grid.map(layers, heads);
    let size = (right + LEGEND, bottom + GAP);
    let area = SVGBackend::new(path, (size.0 as u32, size.1 as u32)).into_drawing_area();
    area.fill(&WHITE)?;
    header(&area, [layers, heads], sentence)?;
    labels(&area, &grid, [layers, heads], tokens)?;
    let maps = weights.chunks_exact(tokens.len() * tokens.len()).enumerate();
    for (i, map) in maps {
        let corner = grid.map(i / heads, i % heads);
        heat_map(&area, &grid, corner, map, tokens.len())?;
    }
    scale(&area, (right + GAP, grid.map(0, 0).1), 2 * SIDE)?;
    area.present().map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(())
}

fn header(area: &Area<'_>, [layers, heads]: [usize; 2], sentence: &str) -> Drawn {
    let title = format!("Attention of {layers} layers of {heads} heads, computed by polyhead");
    let text = format!("\u{201c}{sentence}\u{201d}  Rows attend to columns.");
    label(area, (GAP, 20), &title, 18, INK, (HPos::Left, VPos::Center))?;
    label(area, (GAP, 44), &text, TITLE_SIZE, INK, (HPos::Left, VPos::Center))
}

/// Numbers of layers and heads, and the tokens beside the first column and above the first row.
fn labels(area: &Area<'_>, grid: &Grid, [layers, heads]: [usize; 2], tokens: &[String]) -> Drawn {
    let middle = grid.side / 2;
    for layer in 0..layers {
        let (_, top) = grid.map(layer, 0);
        let at = (GAP, top + middle);
        label(area, at, &format!("layer {layer}"), TITLE_SIZE, INK, (HPos::Left, VPos::Center))?;
    }
    for head in 0..heads {
        let at = (grid.map(0, head).0 + middle, HEADER + TITLE_SIZE / 2);
        label(area, at, &format!("head {head}"), TITLE_SIZE, INK, (HPos::Center, VPos::Center))?;
    }
    if grid.cell < LABELLED {
        return Ok(());
    }
    for (i, token) in tokens.iter().enumerate() {
        let along = grid.cell * i as i32 + grid.cell / 2;
        for layer in 0..layers {
            let (left, top) = grid.map(layer, 0);
            label(area, (left - 4, top + along), token, grid.cell, INK, (HPos::Right, VPos::Center))?;
        }
        for head in 0..heads {
            let (left, top) = grid.map(0, head);
            label_upward(area, (left + along, top - 4), token, grid.cell, INK)?;
        }
    }
    Ok(())
}

fn heat_map(area: &Area<'_>, grid: &Grid, (left, top): (i32, i32), map: &[f32], count: usize) -> Drawn {
    let step = |weight: f32| (weight.max(0.0).sqrt() * STEPS).round();
    for (query, row) in map.chunks_exact(count).enumerate() {
        let y = top + grid.cell * query as i32;
        let mut from = 0;
        while from < count {
            let color = step(row[from]);
            let to = (from + 1..count).find(|&key| step(row[key]) != color).unwrap_or(count);
            // The background is white.
            if color > 0.0 {
                let [x, end] = [from, to].map(|key| left + grid.cell * key as i32);
                let color = color_of((color / STEPS).powi(2)).filled();
                area.draw(&Rectangle::new([(x, y), (end, y + grid.cell)], color))?;
            }
            from = to;
        }
    }
    frame(area, (left, top), (grid.side, grid.side), INK)
}
